#include "operator.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "matmul.h"

// Waking a thread costs some microseconds, so parts are of at least as much work. Tests make them smaller, so that
// small tensors are worked on by several threads.
#ifndef ASCEND_MOE_PART_BYTES
#define ASCEND_MOE_PART_BYTES (1 << 17)
#endif

namespace moe {

const OrtApi* ort_api = nullptr;

namespace {

constexpr std::int64_t kPartBytes = ASCEND_MOE_PART_BYTES;



// Every way out of this library: no exception passes into the runtime.
template <typename Action>
OrtStatus* guarded(const Action& action) noexcept {
  try {
    action();
    return nullptr;
  } catch (const Error& error) {
    return ort::CreateStatus(ErrorCode::invalid_argument, error.what());
  } catch (const std::bad_alloc&) {
    return ort::CreateStatus(ErrorCode::fail, "MemoryError: out of memory in a kernel of ascend_moe");
  } catch (const std::exception& error) {
    return ort::CreateStatus(ErrorCode::fail, error.what());
  } catch (...) {
    return ort::CreateStatus(ErrorCode::fail, "an unknown error in a kernel of ascend_moe");
  }
}

// OrtCustomOp first, so that a pointer to it is one to the whole.
struct Definition {
  OrtCustomOp op;
  const Spec* spec;
};

const Spec& spec_of(const OrtCustomOp* op) { return *reinterpret_cast<const Definition*>(op)->spec; }

TensorInfo read_info(const OrtTensorTypeAndShapeInfo* info, bool symbolic) {
  Type type;
  ort::check(ort::GetTensorElementType(info, &type));
  std::size_t rank = 0;
  ort::check(ort::GetDimensionsCount(info, &rank));
  std::vector<std::int64_t> sizes(rank);
  std::vector<const char*> names(rank, nullptr);
  ort::check(ort::GetDimensions(info, sizes.data(), rank));
  if (symbolic) ort::check(ort::GetSymbolicDimensions(info, names.data(), rank));
  Dims dims(rank);
  for (std::size_t i = 0; i < rank; ++i) {
    if (sizes[i] >= 0) {
      dims[i] = sizes[i];
    } else if (names[i] != nullptr) {
      dims[i] = Dim(std::string(names[i]));
    }
  }
  return TensorInfo(type, std::move(dims));
}

// Attributes of a node, checked; `integer` and `integers` read one, false where the node has none.
template <typename Integer, typename Integers>
Attributes read_attributes(const Spec& spec, const Integer& integer, const Integers& integers) {
  Attributes values;
  for (const Attr& attr : spec.attributes) {
    if (attr.kind == std::string("ints")) {
      std::vector<std::int64_t> list;
      integers(attr.name, list);
      values.set(attr.name, std::move(list));
      continue;
    }
    std::int64_t value = attr.fallback;
    if (!integer(attr.name, value) && attr.required) {
      AttributeValueError(spec.name, ": required attribute '", attr.name, "' (", attr.kind, ", ", attr.rule,
                          ") is missing. Write it out.");
    }
    if (value < attr.low || value > attr.high) {
      AttributeValueError(spec.name, ": attribute '", attr.name, "' must be ", attr.rule, ", got ", value, ".");
    }
    values.set(attr.name, value);
  }
  return values;
}

// Whether the runtime had an attribute. It says in words only whether it is not there or of another kind.
bool was_read(const Spec& spec, const char* name, const char* kind, OrtStatus* status) {
  if (status == nullptr) return true;
  const std::string reason = ort::take_message(status);
  if (reason.find("No attribute") != std::string::npos || reason.find("not found") != std::string::npos) return false;
  AttributeValueError(spec.name, ": attribute '", name, "' must be ", kind, ": ", reason);
}

Attributes attributes_of(const Spec& spec, const OrtKernelInfo* info) {
  return read_attributes(
      spec,
      [&](const char* name, std::int64_t& value) {
        return was_read(spec, name, "a 64-bit integer", ort::KernelInfoGetAttribute_int64(info, name, &value));
      },
      [&](const char* name, std::vector<std::int64_t>& list) {
        std::size_t size = 0;
        if (!was_read(spec, name, "a sequence of 64-bit integers",
                      ort::KernelInfoGetAttributeArray_int64(info, name, nullptr, &size))) {
          return;
        }
        list.resize(size);
        if (size) ort::check(ort::KernelInfoGetAttributeArray_int64(info, name, list.data(), &size));
      });
}

// While shapes are inferred: what cannot be read here is found when the kernel is made.
Attributes attributes_of(const Spec& spec, const OrtShapeInferContext* context) {
  const auto find = [&](const char* name) {
    const OrtOpAttr* attribute = nullptr;
    return ort::take_message(ort::ShapeInferContext_GetAttribute(context, name, &attribute)).empty() ? attribute
                                                                                                      : nullptr;
  };
  return read_attributes(
      spec,
      [&](const char* name, std::int64_t& value) {
        const OrtOpAttr* attribute = find(name);
        if (attribute == nullptr) return false;
        std::size_t size = 0;
        return was_read(spec, name, "a 64-bit integer",
                        ort::ReadOpAttr(attribute, AttrType::integer, &value, sizeof value, &size));
      },
      [&](const char* name, std::vector<std::int64_t>& list) {
        const OrtOpAttr* attribute = find(name);
        if (attribute == nullptr) return;
        std::size_t bytes = 0;
        ort::take_message(ort::ReadOpAttr(attribute, AttrType::integers, nullptr, 0, &bytes));
        list.resize(bytes / sizeof(std::int64_t));
        if (!list.empty()) {
          ort::check(ort::ReadOpAttr(attribute, AttrType::integers, list.data(), bytes, &bytes));
        }
      });
}

void set_output(const OrtShapeInferContext* context, std::size_t index, const TensorInfo& info) {
  OrtTensorTypeAndShapeInfo* raw = nullptr;
  ort::check(ort::CreateTensorTypeAndShapeInfo(&raw));
  const ort::ShapeInfo made(raw);
  std::vector<std::int64_t> sizes;
  std::vector<std::string> texts;
  for (const Dim& dim : info.shape) {
    sizes.push_back(dim.known() ? dim.value : -1);
    // A size without a name would be taken for the number -1; one name on two sizes says that they are equal.
    static std::atomic<unsigned> unknown{0};
    texts.push_back(dim.known() || !dim.name.empty() ? dim.name : words("ascend_moe_size_", unsigned(++unknown)));
  }
  std::vector<const char*> names;
  for (const std::string& text : texts) names.push_back(text.c_str());
  ort::check(ort::SetTensorElementType(raw, info.type));
  ort::check(ort::SetDimensions(raw, sizes.data(), sizes.size()));
  ort::check(ort::SetSymbolicDimensions(raw, names.data(), names.size()));
  ort::check(ort::ShapeInferContext_SetOutputTypeShape(context, index, raw));
}

// What the runtime takes outputs for of which nothing is said: what the last input of free type is.
Type guessed_type(const Spec& spec, const Infos& given) {
  Type guess = Type::undefined;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (given[i].there && spec.inputs[i].kind != Kind::indices) guess = given[i].type;
  }
  return guess;
}

// What is refused while shapes are inferred is refused again, in words, by the run: the runtime passes over it here. But
// it guesses the outputs' types, from a routing map for example, and then refuses the node for it.
void set_types(const Spec& spec, const Infos& given, const OrtShapeInferContext* context) {
  const Type guess = guessed_type(spec, given);
  for (std::size_t i = 0; i < spec.outputs.size(); ++i) {
    const Arg& output = spec.outputs[i];
    const TensorInfo& source = given[std::size_t(output.like)].there ? given[std::size_t(output.like)] : given[0];
    if (output.kind != Kind::indices && source.there && source.type != guess) {
      const std::string axes = output.axes;
      const std::size_t rank =
          is_any(output.axes) ? source.shape.size() : (axes.substr(0, axes.find(" |")).size() + 1) / 2;
      set_output(context, i, TensorInfo(source.type, Dims(rank)));
    }
  }
}

OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) {
  return guarded([&] {
    const Spec& spec = spec_of(op);
    std::size_t count = 0;
    ort::check(ort::ShapeInferContext_GetInputCount(context, &count));
    Infos given(spec.inputs.size());
    for (std::size_t i = 0; i < std::min(count, given.size()); ++i) {
      OrtTensorTypeAndShapeInfo* info = nullptr;
      ort::check(ort::ShapeInferContext_GetInputTypeShape(context, i, &info));
      TensorInfo read = read_info(info, true);
      if (read.type == Type::undefined) continue;  // an input that the node leaves out
      read.ranked = !read.shape.empty();           // an unknown shape comes as one without dimensions
      given[i] = std::move(read);
    }
    Infos made;
    try {
      made = spec.check(given, attributes_of(spec, context));
    } catch (const Error&) {
      set_types(spec, given, context);
      throw;
    }
    const Type guess = guessed_type(spec, given);
    for (std::size_t i = 0; i < made.size(); ++i) {
      // A type without a rank cannot be said: it would be a tensor without axes.
      if (made[i].ranked || made[i].type != guess) set_output(context, i, made[i]);
    }
  });
}

OrtStatus* create(const OrtCustomOp* op, const OrtApi*, const OrtKernelInfo* info, void** kernel) {
  return guarded([&] {
    const Spec& spec = spec_of(op);
    auto node = std::unique_ptr<Node>(new Node{spec, attributes_of(spec, info), nullptr});
    if (spec.multiplies) node->products = std::make_unique<MatMuls>(info);
    *kernel = node.release();
  });
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  return guarded([&] {
    const Node& node = *static_cast<const Node*>(kernel);
    Call call(node, context);
    node.spec.compute(call);
  });
}

}  // namespace

Call::Call(const Node& made, OrtKernelContext* context)
    : node(made), attributes(made.attributes), context_(context), infos_(made.spec.inputs.size()),
      data_(made.spec.inputs.size()) {
  std::size_t count = 0;
  ort::check(ort::KernelContext_GetInputCount(context, &count));
  for (std::size_t i = 0; i < std::min(count, infos_.size()); ++i) {
    const OrtValue* value = nullptr;
    ort::check(ort::KernelContext_GetInput(context, i, &value));
    if (value == nullptr) continue;
    OrtTensorTypeAndShapeInfo* raw = nullptr;
    ort::check(ort::GetTensorTypeAndShape(value, &raw));
    const ort::ShapeInfo info(raw);
    infos_[i] = read_info(raw, false);
    // The data of an input is only read; the C ABI has no other way to it.
    ort::check(ort::GetTensorMutableData(const_cast<OrtValue*>(value), &data_[i]));
    if (made.spec.inputs[i].kind == Kind::maps && (infos_[i].type == Type::boolean || infos_[i].type == Type::int8)) {
      const auto* map = static_cast<const std::int8_t*>(data_[i]);
      infos_[i].selected = elements(i) - std::count(map, map + elements(i), 0);
    }
  }
  outputs_ = made.spec.check(infos_, attributes);
}

std::int64_t Call::elements(std::size_t index) const {
  std::int64_t product = 1;
  for (const Dim& dim : infos_[index].shape) product *= dim.value;
  return product;
}

std::vector<std::int64_t> Call::output_shape(std::size_t index) const {
  std::vector<std::int64_t> sizes;
  for (const Dim& dim : outputs_[index].shape) sizes.push_back(dim.value);
  return sizes;
}

void* Call::allocate(std::size_t index, const std::vector<std::int64_t>& shape) {
  std::size_t count = 0;
  ort::check(ort::KernelContext_GetOutputCount(context_, &count));
  if (index >= count) return nullptr;
  OrtValue* value = nullptr;
  ort::check(ort::KernelContext_GetOutput(context_, index, shape.data(), shape.size(), &value));
  // An empty tensor that the caller has bound may have an address.
  if (value == nullptr || std::find(shape.begin(), shape.end(), 0) != shape.end()) return nullptr;
  void* data = nullptr;
  ort::check(ort::GetTensorMutableData(value, &data));
  return data;
}

void Call::run_parts(std::int64_t rows, std::int64_t bytes_per_row, void (*run)(void*, std::size_t),
                     const void* task) const {
  if (rows <= 0) return;
  const std::int64_t each = std::max<std::int64_t>(1, kPartBytes / std::max<std::int64_t>(1, bytes_per_row));
  Parts parts{task, rows, std::min(each, rows)};
  const std::size_t total = std::size_t((rows + parts.rows_each - 1) / parts.rows_each);
  if (total == 1) return run(&parts, 0);
  ort::check(ort::KernelContext_ParallelFor(context_, run, total, std::size_t(0), static_cast<void*>(&parts)));
}

OrtCustomOp* custom_op(const Spec& spec) {
  auto* made = new Definition{};  // lives as long as the process: sessions keep pointers to it
  made->spec = &spec;
  OrtCustomOp& op = made->op;
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp* self) { return spec_of(self).name; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputType = [](const OrtCustomOp* self, std::size_t i) {
    return spec_of(self).inputs[i].kind == Kind::indices ? Type::int32 : Type::undefined;
  };
  op.GetInputTypeCount = [](const OrtCustomOp* self) { return spec_of(self).inputs.size(); };
  op.GetOutputType = [](const OrtCustomOp* self, std::size_t i) {
    return spec_of(self).outputs[i].kind == Kind::indices ? Type::int32 : Type::undefined;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp* self) { return spec_of(self).outputs.size(); };
  op.GetInputCharacteristic = [](const OrtCustomOp* self, std::size_t i) {
    return spec_of(self).inputs[i].optional ? Characteristic::optional : Characteristic::required;
  };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t i) {
    return i == 0 ? Characteristic::required : Characteristic::optional;
  };
  op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t) -> std::int32_t { return 0; };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.InferOutputShapeFn = infer;
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
  return &op;
}

}  // namespace moe
