// MoeInitRoutingV2Grad: each token is the sum of its K rows, see card.md beside this file.

#include "../native/indices.h"
#include "../native/operator.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeInitRoutingV2Grad";
enum Input { kGrad, kIndex };

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  const bool padded = attributes["drop_pad_mode"] == 1;
  const std::int64_t active = attributes["active_num"];
  Axes axes(kName);
  axes.read({{"expanded_row_idx", inputs[kIndex], "N"},
             {"grad_expanded_x", inputs[kGrad], padded ? "E C H" : active ? "A H" : "N H"}});
  if (active && !padded) axes.bind('A', active, "attribute 'active_num'");
  const Dim tokens = axes.divide('N', attributes["top_k"], "top_k");
  return {TensorInfo(inputs[kGrad].type, {tokens, axes['H']})};
}

// out = sum, in slot order, of the rows that `slots` name; what is not in [0, num_rows) names none.
template <typename T>
void sum_slots(T* out, const T* rows, std::int64_t num_rows, const std::int32_t* slots, std::int64_t top_k,
               std::int64_t hidden) {
  constexpr std::int64_t kMany = 512;
  const auto is_named = [=](std::int64_t k) { return slots[k] >= 0 && slots[k] < num_rows; };
  if (top_k <= kMany) {
    const T* named[kMany];
    std::size_t count = 0;
    for (std::int64_t k = 0; k < top_k; ++k) {
      if (is_named(k)) named[count++] = rows + slots[k] * hidden;
    }
    rows_of<T>().sum(out, named, count, std::size_t(hidden));
    return;
  }
  // More slots than any model has: right, and slow.
  for (std::int64_t i = 0; i < hidden; ++i) {
    Wide<T> total = 0;
    for (std::int64_t k = 0; k < top_k; ++k) {
      if (is_named(k)) total += widen(rows[slots[k] * hidden + i]);
    }
    narrow(total, out[i]);
  }
}

template <typename T>
void run(Call& call, std::int64_t rows, std::int64_t top_k) {
  const std::vector<std::int64_t> shape = call.output_shape(0);
  const std::int64_t tokens = shape[0], hidden = shape[1];
  T* const out = call.output<T>(0, shape);
  if (out == nullptr || hidden == 0) return;
  const T* const grad = call.input<T>(kGrad);
  const std::int32_t* const slots = call.input<std::int32_t>(kIndex);
  call.parallel(tokens, (top_k + 1) * hidden * std::int64_t(sizeof(T)), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      sum_slots(out + token * hidden, grad, rows, slots + token * top_k, top_k, hidden);
    }
  });
}

void compute(Call& call) {
  const bool padded = call.attributes["drop_pad_mode"] == 1;
  const bool active = call.attributes["active_num"] > 0;
  const std::int64_t slots = call.size(kIndex, 0);
  const std::int64_t rows = padded ? call.size(kGrad, 0) * call.size(kGrad, 1) : call.size(kGrad, 0);
  const Index index{kName, "expanded_row_idx", call.input<std::int32_t>(kIndex), slots};
  const std::int64_t named = padded ? rows : slots;
  const char* const mode = padded   ? "drop/pad, -1 is a dropped slot"
                           : active ? "active, drop_pad_mode 0"
                                    : "dropless, drop_pad_mode 0";
  check_range(index, padded ? -1 : 0, named, mode);
  check_unique(index, named, "each slot has a row of its own");
  for_float(call.info(kGrad).type, [&](auto zero) { run<decltype(zero)>(call, rows, call.attributes["top_k"]); });
}

}  // namespace

extern const Spec moe_init_routing_v2_grad = {
    kName,
    {{"grad_expanded_x", "N H | A H | E C H"}, {"expanded_row_idx", "N", Kind::indices}},
    {{"grad_x", "T H"}},
    {
        {"top_k", "int", "> 0", 1, INT64_MAX, 0, true},
        switch_attribute("drop_pad_mode"),
        {"active_num", "int", ">= 0", 0, INT64_MAX},
    },
    shapes,
    compute,
};

}  // namespace moe
