"""The manifest of a training graph against its own config and optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from moe_onnx.build.config import MoeLMConfig
from moe_onnx.build.forward import batch_inputs, moe_layers
from moe_onnx.build.imported import ImportedModel
from moe_onnx.build.manifest import Manifest, ParameterInfo
from moe_onnx.build.optimizers import Optimizer, state_names
from moe_onnx.build.parameters import Parameter, parameters_of
from moe_onnx.validation.findings import Finding, Outcome, Skipped
from moe_onnx.validation.registry import check, code
from moe_onnx.validation.subject import Subject
from moe_onnx.validation.training.prepared import Config, as_one, few, tensor_text, training_of

PARAMETERS = code(
    "MO603",
    "error",
    "The parameters are not those of the config",
    why="Config, layers, experts and ties decide which parameters a model has, and their names are those of "
    "transformers. A name that is missing is a layer, a router or a stack of experts that does not train; "
    "with another name a checkpoint does not load; a second matrix where the config ties the embedding "
    "to the output makes two models of one.",
    mend="Build the graph again from the config, or mend the config in the manifest.",
)
SHAPES = code(
    "MO604",
    "error",
    "A parameter has another shape than its config says",
    why="The first axis of an expert parameter is the expert: one row block less is an expert that was lost "
    "on the way, while the router still sends tokens to it.",
    mend="Build the graph again from the config; stack all experts of a layer into its parameters.",
)
OPTIMIZER = code(
    "MO606",
    "error",
    "The manifest contradicts its own config or optimizer",
    why="AdamW needs exp_avg and exp_avg_sq of each trained parameter, SGD with momentum a momentum_buffer; "
    "a selection bias has neither. What dispatch the graphs were built for limits the batches a trainer may "
    "give them.",
    mend="Build the graphs again with the optimizer and the config that are meant.",
)


@check("static", PARAMETERS, SHAPES)
def parameters(subject: Subject) -> Iterator[Outcome]:
    """The manifest has the parameters of its config: every layer, every expert, names and ties."""
    training = training_of(subject)
    if isinstance(training, str):
        yield Skipped(training)
        return
    if training.config is None:
        yield Skipped(training.no_config)
        return
    expected = {parameter.name: parameter for parameter in parameters_of(training.config)}
    found = {parameter.name: parameter for parameter in training.manifest.parameters}
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    if missing or extra:
        said = [f"it lacks {few(missing)}"] if missing else []
        said += [f"it has {few(extra)}, which the config does not call for"] if extra else []
        tied = isinstance(training.config, MoeLMConfig) and training.config.tie_word_embeddings
        if tied and "lm_head.weight" in extra:
            said.append("the config ties the output to 'model.embed_tokens.weight'")
        yield PARAMETERS(
            "parameters of the manifest",
            found="; ".join(said),
            expected=f"the {len(expected)} of its config",
            places=[f"parameter {name!r}" for name in (*missing, *extra)],
        )
    same: dict[str, list[Finding]] = {}
    for finding in _shapes(training.config, expected, found):
        same.setdefault(
            finding.found.partition(" shape ")[0] if "experts" in finding.where else "", []
        ).append(finding)
    for findings in same.values():
        yield as_one(findings, "parameters")


def _shapes(
    config: Config, expected: dict[str, Parameter], found: dict[str, ParameterInfo]
) -> Iterator[Finding]:
    for name in expected:
        if name not in found:
            continue
        want, have = expected[name].shape, found[name].shape
        if have != want:
            is_stack = "experts." in name and have[:1] != want[:1] and have[:1]
            lost = f"{have[0]} of {config.num_experts} experts, shape " if is_stack else ""
            yield SHAPES(f"parameter {name!r}", found=f"{lost}{list(have)}", expected=f"{list(want)}")
        elif found[name].trained != expected[name].trained:
            said = {True: "trained by its gradient", False: "not trained by a gradient"}
            yield SHAPES(
                f"parameter {name!r}",
                found=said[found[name].trained],
                expected=said[expected[name].trained],
            )


@check("static", OPTIMIZER, PARAMETERS)
def optimizer(subject: Subject) -> Iterator[Outcome]:
    """States, weight decay, batch and dispatch in the manifest are those of config and optimizer."""
    training = training_of(subject)
    if isinstance(training, str):
        yield Skipped(training)
        return
    if training.optimizer is not None:
        yield from _states(training.manifest, training.optimizer)
    elif training.manifest.optimizer is not None:
        yield Skipped("the manifest's optimizer is not known (MO602)")
    elif updating := [name for name in ("step", "apply") if name in training.manifest.graphs]:
        yield OPTIMIZER("the manifest", found=f"graphs {few(updating)} without an optimizer")
    if training.imported is not None:
        yield from _imported(training.manifest, training.imported)
    if training.config is None:
        yield Skipped(training.no_config)
        return
    yield from _dispatch(training.manifest, training.config)
    yield from _batch(training.manifest, training.config)


def _states(manifest: Manifest, optimizer: Optimizer) -> Iterator[Outcome]:
    wrong: dict[tuple[str, str, bool], list[str]] = {}
    decays = []
    for parameter in manifest.parameters:
        wanted = state_names(optimizer) if parameter.trained else ()
        if parameter.state.keys() != set(wanted):
            have = ", ".join(map(repr, parameter.state)) or "none"
            need = ", ".join(wanted) or "none"
            wrong.setdefault((have, need, parameter.trained), []).append(parameter.name)
        if parameter.weight_decay != (parameter.trained and optimizer.decays(parameter.name)):
            decays.append(parameter.name)
    kind = type(optimizer).__name__
    for (have, need, trained), names in wrong.items():
        why = f"those of {kind}" if trained else "as no gradient trains it"
        more = f"; and {len(names) - 1} more parameters alike" if len(names) > 1 else ""
        places = [f"states of parameter {name!r}" for name in names]
        yield OPTIMIZER(places[0], found=f"{have}{more}", expected=f"{need}, {why}", places=places)
    if decays:
        is_on = manifest.parameter(decays[0]).weight_decay
        places = [f"weight decay of parameter {name!r}" for name in decays]
        yield OPTIMIZER(
            places[0],
            found=f"{is_on} for {few(decays)}",
            expected=f"{not is_on}, by the optimizer's weight_decay and no_decay",
            places=places,
        )


def _dispatch(manifest: Manifest, config: Config) -> Iterator[Outcome]:
    experts = moe_layers(config) > 0
    wanted = {
        "kind": config.dispatch,
        "mode": config.dispatch_mode,
        "expert_capacity": config.capacity if experts else 0,
        "active_num": config.active_num if experts else 0,
    }
    for key, value in wanted.items():
        if key in manifest.dispatch and manifest.dispatch[key] != value:
            have = manifest.dispatch[key]
            yield OPTIMIZER(f"'dispatch.{key}' of the manifest", found=f"{have!r:.60}", expected=f"{value!r}")


def _imported(manifest: Manifest, config: ImportedModel) -> Iterator[Outcome]:
    """Batch inputs are those of the model, and the one that its loss needs; what is listed is there."""
    for assembly, graph in manifest.graphs.items():
        losses = assembly in ("step", "grad", "eval")
        for one in graph.inputs_of("batch"):
            is_target = losses and one.name == config.target
            wanted = config.inputs.get(one.name)
            if (wanted is None and not is_target) or (
                wanted is not None and wanted != (one.dtype, one.shape)
            ):
                yield OPTIMIZER(
                    f"batch inputs of the graph {assembly!r} in the manifest",
                    found=f"{one.name!r} is {tensor_text((one.dtype, one.shape))}",
                    expected=tensor_text(wanted),
                )
        if losses and config.target and config.target not in [one.name for one in graph.inputs_of("batch")]:
            yield OPTIMIZER(
                f"batch inputs of the graph {assembly!r} in the manifest",
                found=f"{config.target!r} is absent",
                expected=f"it is there, as the loss {config.loss!r} needs it",
            )
    known = {parameter.name for parameter in manifest.parameters}
    if lost := [n for n in (*config.tied, *config.split, *config.renamed) if n not in known]:
        yield PARAMETERS(
            "parameters of the manifest",
            found=f"it lacks {few(dict.fromkeys(lost))}",
            expected="those of its config",
        )


def _batch(manifest: Manifest, config: Config) -> Iterator[Outcome]:
    for assembly in ("step", "grad", "eval", "forward"):
        if assembly not in manifest.graphs:
            continue
        trains = assembly in ("step", "grad")
        wanted = batch_inputs(config, losses=assembly != "forward", training=trains)
        have = {one.name: (one.dtype, one.shape) for one in manifest.graphs[assembly].inputs_of("batch")}
        if have != wanted:
            differ = [name for name in {**wanted, **have} if have.get(name) != wanted.get(name)]
            yield OPTIMIZER(
                f"batch inputs of the graph {assembly!r} in the manifest",
                found=f"{differ[0]!r} is {tensor_text(have.get(differ[0]))}",
                expected=tensor_text(wanted.get(differ[0])),
            )
