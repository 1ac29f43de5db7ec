// MoeTokenUnpermuteWithRoutingMapGrad: the gradient of the combine, for rows and for probabilities, see card.md
// beside this file.

#include <cstring>

#include "../native/indices.h"
#include "../native/operator.h"
#include "../native/routing_map.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeTokenUnpermuteWithRoutingMapGrad";
enum Input { kGrad, kIndex, kToken, kMap, kPermuted, kProbs };

void missing(const Infos& inputs, const Attributes&) {
  const TensorInfo &grad = inputs[kGrad], &map = inputs[kMap], &permuted = inputs[kPermuted];
  const Presence there = presence(inputs[kProbs]);
  if (!grad.there || there == Presence::no) return;
  // A map of shape (0, 0) beside present probs is never the required [T, E]; P may be, if H is 0.
  // Where it is not known whether probs is empty, only inputs that are not even named are missing.
  const bool no_width = grad.ranked && !grad.shape.empty() && grad.shape.back().is(0);
  const bool sure = there == Presence::yes;
  require_companion(kName, "routing_map", map.there && !(sure && map.empty_pair()));
  require_companion(kName, "permuted_tokens", permuted.there && !(sure && permuted.empty_pair() && !no_width));
}

void mixes(const Infos& inputs) {
  const TensorInfo &grad = inputs[kGrad], &permuted = inputs[kPermuted], &probs = inputs[kProbs];
  if (presence(permuted) != Presence::no) {
    require_same_dtype(kName, "unpermuted_tokens_grad", grad, "permuted_tokens", permuted);
  }
  if (presence(probs) != Presence::no) check_probs_dtype(kName, "unpermuted_tokens_grad", grad, probs);
}

// Unpadded, P has a row for every slot, or one for every pair that the map selects.
void check_rows(const Axes& axes, const TensorInfo& permuted, const TensorInfo& map) {
  const Dim &rows = axes['P'], &slots = axes['N'];
  if (!permuted.there || !rows.known() || !slots.known() || rows.value == slots.value) return;
  // Fewer rows can be told to be wrong only where the map's values are known, or there is no map.
  const bool no_map = !map.there || (map.empty_pair() && !axes['T'].is(0));
  const std::int64_t selected = no_map ? slots.value : map.selected;
  if (rows.value > slots.value || (selected >= 0 && selected != rows.value)) {
    ShapeError(kName, ": 'permuted_tokens' must have N = ", slots.value, " rows, or as many as 'routing_map' selects (",
               selected < 0 ? "unknown" : words(selected), ") when 'out_index' names no later one, got shape ",
               show(permuted.shape), ".");
  }
}

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  const bool present = presence(inputs[kProbs]) != Presence::no;
  const bool padded = attributes["drop_and_pad"] != 0;
  // The six-input form has empty constants where companions are absent.
  const TensorInfo map = present ? inputs[kMap] : where_present(inputs[kMap]);
  const TensorInfo permuted = present ? inputs[kPermuted] : where_present(inputs[kPermuted]);
  Axes axes(kName);
  axes.read({{"unpermuted_tokens_grad", inputs[kGrad], "T H"},
             {"out_index", inputs[kIndex], "N"},
             {"permute_token_id", inputs[kToken], "N"},
             {"routing_map", map, "T E"},
             {"permuted_tokens", permuted, padded ? "N H" : "P H"},
             {"probs", present ? inputs[kProbs] : TensorInfo(), "T E"}});
  if (padded) {
    check_restore_shape(kName, attributes.list("restore_shape"), "unpermuted_tokens_grad", inputs[kGrad]);
    if (axes['T'].is(0) && axes['N'].value > 0) {
      ShapeError(kName, ": without tokens 'out_index' must be empty, got ", axes['N'].value, " slots.");
    }
    if (present) axes.bind('C', axes.divide('N', axes['E'], "the number of experts"), "N / E");
  } else {
    axes.bind('K', axes.divide('N', axes['T'], "the number of tokens"), "N / T");
    check_rows(axes, permuted, inputs[kMap]);
  }
  if (present) check_limits(kName, axes, padded);
  const TensorInfo rows(inputs[kGrad].type, {axes['N'], axes['H']});
  if (!inputs[kProbs].there) return {rows, TensorInfo()};
  if (presence(inputs[kProbs]) == Presence::yes) {
    return {rows, TensorInfo(inputs[kProbs].type, {axes['T'], axes['E']})};
  }
  return {rows, inputs[kProbs]};
}

// What each slot means; the index values are checked.
struct Plan {
  std::int64_t tokens, rows, hidden, experts;
  bool padded;
  bool slot_form;
  Bits named;                       // rows that a slot names
  std::vector<std::int64_t> cells;  // of each slot, or by row in row form; none when padded or without probs

  std::int64_t token(const std::int32_t* tokens_of, std::int64_t slot) const {
    return slot_form ? slot / std::max<std::int64_t>(rows / std::max<std::int64_t>(tokens, 1), 1) : tokens_of[slot];
  }
  std::int64_t cell(std::int64_t slot, std::int64_t row, std::int64_t token) const {
    if (padded) return token * experts + row / std::max<std::int64_t>(rows / std::max<std::int64_t>(experts, 1), 1);
    return cells[std::size_t(slot_form ? slot : row)];
  }
};

Plan prepare(const Call& call) {
  const std::int64_t tokens = call.size(kGrad, 0), rows = call.size(kIndex, 0);
  const bool padded = call.attributes["drop_and_pad"] != 0, has_probs = call.is_given(kProbs);
  const auto *index = call.input<std::int32_t>(kIndex), *token = call.input<std::int32_t>(kToken);
  const Index out_index{kName, "out_index", index, rows};
  check_range(out_index, padded ? 0 : -1, rows, padded ? "drop_and_pad" : "-1 skips the slot");
  Plan plan{tokens, rows, call.size(kGrad, 1), has_probs ? call.size(kProbs, 1) : 0, padded, false,
            check_unique(out_index, rows, "two slots cannot write one row"), {}};
  plan.slot_form = !padded && std::equal(index, index + rows, token);
  if (!plan.slot_form) {
    const Index of_tokens{kName, "permute_token_id", token, rows};
    const std::int64_t end = std::max<std::int64_t>(tokens, 1);
    for (std::int64_t i = 0; i < rows; ++i) {
      // A skipped slot's token is not read, so whatever stands there is right.
      if (index[i] >= 0 && (token[i] < 0 || token[i] >= end)) out_of_range(of_tokens, i, 0, end, "a token");
    }
  }
  if ((has_probs ? call.is_there(kPermuted) : call.is_given(kPermuted)) && !padded) {
    const std::int32_t last = rows ? *std::max_element(index, index + rows) : -1;
    if (last >= call.size(kPermuted, 0)) {
      ShapeError(kName, ": 'permuted_tokens' must have N = ", rows,
                 " rows, or as many as 'routing_map' selects when 'out_index' names no later one, got shape ",
                 show(call.info(kPermuted).shape), " and row ", last, ".");
    }
  }
  if (has_probs && !padded) {
    const auto* map = call.input<std::int8_t>(kMap);
    plan.cells = plan.slot_form
                     ? slot_cells(kName, map, tokens, plan.experts, rows / std::max<std::int64_t>(tokens, 1))
                     : row_cells(kName, map, tokens, plan.experts, rows);
  }
  return plan;
}

template <typename T>
void copy_rows(Call& call, const Plan& plan) {
  T* const rows_grad = call.output<T>(0, call.output_shape(0));
  call.output<T>(1, call.output_shape(1));
  if (plan.hidden == 0 || rows_grad == nullptr) return;
  const T* const grad = call.input<T>(kGrad);
  const auto *index = call.input<std::int32_t>(kIndex), *token = call.input<std::int32_t>(kToken);
  const std::int64_t bytes = plan.hidden * std::int64_t(sizeof(T));
  const auto copy = plan.rows * bytes >= std::int64_t(kPastCaches) ? row_table().copy_past : row_table().copy;
  call.parallel(plan.rows, 2 * bytes, [=, &plan](std::int64_t begin, std::int64_t end) {
    for (std::int64_t slot = begin; slot < end; ++slot) {
      if (index[slot] < 0) continue;
      const T* const from = grad + plan.token(token, slot) * plan.hidden;
      copy(rows_grad + index[slot] * plan.hidden, from, std::size_t(bytes));
    }
  });
  zero_unnamed(call, rows_grad, plan.rows, bytes, [&](std::int64_t row) { return plan.named[row]; });
}

template <typename T, typename P>
void weigh_rows(Call& call, const Plan& plan) {
  T* const rows_grad = call.output<T>(0, call.output_shape(0));
  P* const probs_grad = call.output<P>(1, call.output_shape(1));
  const T *const grad = call.input<T>(kGrad), *const permuted = call.input<T>(kPermuted);
  const P* const probs = call.input<P>(kProbs);
  const auto *index = call.input<std::int32_t>(kIndex), *token = call.input<std::int32_t>(kToken);
  const std::size_t width = std::size_t(plan.hidden);
  const bool past = std::size_t(plan.rows) * width * sizeof(T) >= kPastCaches;
  const auto scale = past ? rows_of<T>().scale_past : rows_of<T>().scale;
  if (probs_grad != nullptr) {
    std::memset(static_cast<void*>(probs_grad), 0, std::size_t(plan.tokens * plan.experts) * sizeof(P));
  }
  // Padded, two slots may name one cell, of which the last counts: their dots wait until all are made.
  std::vector<Wide<T>> dots(plan.padded && probs_grad != nullptr ? std::size_t(plan.rows) : 0);
  call.parallel(plan.rows, 4 * plan.hidden * std::int64_t(sizeof(T)), [=, &plan, &dots](std::int64_t begin,
                                                                                      std::int64_t end) {
    for (std::int64_t slot = begin; slot < end; ++slot) {
      const std::int64_t row = index[slot];
      if (row < 0) continue;
      const std::int64_t from = plan.token(token, slot), cell = plan.cell(slot, row, from);
      T* const out = rows_grad + row * plan.hidden;
      if (cell < 0) {
        if (width) std::memset(static_cast<void*>(out), 0, width * sizeof(T));
        continue;
      }
      const T* const moved = grad + from * plan.hidden;
      const Wide<T> weight = widen(probs[cell]);
      if (probs_grad == nullptr) {
        scale(out, moved, weight, width);
        continue;
      }
      const std::int64_t next = slot + 1 < end && index[slot + 1] >= 0 ? index[slot + 1] : row;
      const Wide<T> dot = rows_of<T>().scale_and_dot(out, moved, weight, permuted + row * plan.hidden,
                                                     permuted + next * plan.hidden, width, past);
      if (plan.padded) {
        dots[std::size_t(slot)] = dot;
      } else {
        narrow(dot, probs_grad[cell]);
      }
    }
  });
  for (std::size_t slot = 0; slot < dots.size(); ++slot) {
    narrow(dots[slot], probs_grad[plan.cell(std::int64_t(slot), index[slot], token[slot])]);
  }
  if (rows_grad == nullptr) return;
  const std::int64_t bytes = plan.hidden * std::int64_t(sizeof(T));
  zero_unnamed(call, rows_grad, plan.rows, bytes, [&](std::int64_t row) { return plan.named[row]; });
}

void compute(Call& call) {
  const Plan plan = prepare(call);
  const Type rows = call.info(kGrad).type;
  if (!call.is_given(kProbs)) {
    for_float(rows, [&](auto zero) { copy_rows<decltype(zero)>(call, plan); });
    return;
  }
  for_floats(rows, call.info(kProbs).type, [&](auto zero, auto prob) {
    weigh_rows<decltype(zero), decltype(prob)>(call, plan);
  });
}

}  // namespace

extern const Spec moe_token_unpermute_with_routing_map_grad = {
    kName,
    {
        {"unpermuted_tokens_grad", "T H"},
        {"out_index", "N", Kind::indices},
        {"permute_token_id", "N", Kind::indices},
        {"routing_map", "T E", Kind::maps, true},
        {"permuted_tokens", "N H | P H", Kind::floats, true},
        {"probs", "T E", Kind::floats, true},
    },
    {{"permuted_tokens_grad", "N H"}, {"probs_grad", "T E", Kind::floats, true, kProbs}},
    {switch_attribute("drop_and_pad"), restore_shape_attribute()},
    shapes,
    compute,
    missing,
    mixes,
};

}  // namespace moe
