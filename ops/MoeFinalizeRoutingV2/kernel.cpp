// MoeFinalizeRoutingV2: each token is the scaled sum of its experts' rows, see card.md beside this file.

#include "../native/indices.h"
#include "../native/operator.h"
#include "../native/routing_map.h"
#include "../native/slots.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeFinalizeRoutingV2";
enum Input { kRows, kIndex, kX1, kX2, kBias, kScales, kExperts };

bool is_padded(const Attributes& attributes) { return attributes["drop_pad_mode"] % 2 == 1; }

void missing(const Infos& inputs, const Attributes&) {
  // What may be absent, as its sizes are not known, is not missing.
  const auto is_there = [&](Input input) { return presence(inputs[input]) != Presence::no; };
  if (presence(inputs[kX2]) == Presence::yes) require_companion(kName, "x1", is_there(kX1), "x2");
  if (presence(inputs[kBias]) == Presence::yes) require_companion(kName, "expert_idx", is_there(kExperts), "bias");
}

void mixes(const Infos& inputs) {
  check_slot_dtypes(kName, "expanded_x", inputs[kRows], inputs[kScales],
                    {{"x1", inputs[kX1]}, {"x2", inputs[kX2]}, {"bias", inputs[kBias]}});
}

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  const TensorInfo x1 = where_present(inputs[kX1]), x2 = where_present(inputs[kX2]);
  const TensorInfo bias = where_present(inputs[kBias]), scales = where_present(inputs[kScales]);
  const TensorInfo experts = where_present(inputs[kExperts]);
  Axes axes(kName);
  axes.read({{"expanded_row_idx", inputs[kIndex], "N"},
             {"expanded_x", inputs[kRows], is_padded(attributes) ? "E C H" : "N H"},
             {"x1", x1, "T H"},
             {"x2", x2, "T H"},
             {"bias", bias, "E H"},
             {"scales", scales, "T K"},
             {"expert_idx", experts, "T K"}});
  bind_slots(axes, inputs[kScales]);
  return {TensorInfo(inputs[kRows].type, {axes['T'], axes['H']})};
}

// What is added up for one token, in order: x1, x2 and the rows of its slots. Pointers of a few terms stand on the
// stack, those of more in scratch memory with a part for each token, as tasks must not allocate.
template <typename T>
struct Terms {
  static constexpr std::size_t kMany = 128;

  Terms(std::int64_t tokens, std::int64_t top_k, bool has_bias, bool has_scales)
      : biased(has_bias), weighted(has_scales || has_bias), most(std::size_t(top_k) + 2) {
    if (most <= kMany) return;
    rows.resize(std::size_t(tokens) * most);
    if (biased) biases.resize(rows.size());
    if (weighted) weights.resize(rows.size());
  }

  // fill(add) calls add(row, bias, weight) for each term; out is their sum.
  template <typename Fill>
  void sum(T* out, std::int64_t token, std::size_t width, const Fill& fill) {
    const T *few_rows[kMany], *few_biases[kMany];
    Wide<T> few_weights[kMany];
    const std::size_t start = std::size_t(token) * most;
    const T** const row = most <= kMany ? few_rows : rows.data() + start;
    const T** const bias = most <= kMany ? few_biases : biases.data() + start;
    Wide<T>* const weight = most <= kMany ? few_weights : weights.data() + start;
    std::size_t count = 0;
    fill([&](const T* r, const T* b, Wide<T> w) {
      row[count] = r;
      if (biased) bias[count] = b;
      if (weighted) weight[count] = w;
      ++count;
    });
    if (biased) return rows_of<T>().biased_sum(out, row, bias, weight, count, width);
    if (weighted) return rows_of<T>().weighted_sum(out, row, weight, count, width);
    rows_of<T>().sum(out, row, count, width);
  }

  const bool biased, weighted;
  const std::size_t most;
  std::vector<const T*> rows, biases;
  std::vector<Wide<T>> weights;
};

template <typename T, typename P>
void run(Call& call, const Slots& slots) {
  T* const out = call.output<T>(0, call.output_shape(0));
  const std::int64_t hidden = call.output_shape(0)[1], top_k = slots.top_k;
  if (out == nullptr || hidden == 0) return;
  const auto find = [&](Input input) { return call.is_given(input) ? call.input<T>(input) : nullptr; };
  const T *const rows = call.input<T>(kRows), *const x1 = find(kX1), *const x2 = find(kX2), *const bias = find(kBias);
  const P* const scales = call.is_given(kScales) ? call.input<P>(kScales) : nullptr;
  const auto* const experts = call.input<std::int32_t>(kExperts);
  Terms<T> terms(slots.tokens, top_k, bias != nullptr, scales != nullptr);
  const std::int64_t bytes = (top_k + 3) * hidden * std::int64_t(sizeof(T));
  call.parallel(slots.tokens, bytes, [=, &terms](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      terms.sum(out + token * hidden, token, std::size_t(hidden), [&](const auto& add) {
        // A product with 1 is exact, so x1 and x2 may be weighted too.
        if (x1 != nullptr) add(x1 + token * hidden, nullptr, 1);
        if (x2 != nullptr) add(x2 + token * hidden, nullptr, 1);
        for (std::int64_t k = 0; k < top_k; ++k) {
          const std::int64_t row = slots.row(token, k), slot = token * top_k + k;
          if (row < 0) continue;
          add(rows + row * hidden, bias == nullptr ? nullptr : bias + experts[slot] * hidden,
              scales == nullptr ? Wide<T>(1) : widen(scales[slot]));
        }
      });
    }
  });
}

void compute(Call& call) {
  const bool padded = is_padded(call.attributes);
  const std::int64_t rows = padded ? call.size(kRows, 0) * call.size(kRows, 1) : call.size(kRows, 0);
  const Index index{kName, "expanded_row_idx", call.input<std::int32_t>(kIndex), call.size(kIndex, 0)};
  check_range(index, padded ? -1 : 0, rows,
              padded ? "drop/pad, -1 is a dropped slot" : "dropless, drop_pad_mode 0 or 2");
  check_unique(index, std::min(rows, kMaxRows + 1), "each slot has a row of its own");
  const std::int64_t top_k = call.is_given(kScales) ? call.size(kScales, 1) : 1;
  const Slots slots{index.values, call.output_shape(0)[0], top_k, rows, call.attributes["drop_pad_mode"] < 2};
  if (call.is_given(kBias)) {
    check_experts(kName, call.input<std::int32_t>(kExperts), call.size(kBias, 0), slots);
  }
  const Type scales = call.is_given(kScales) ? call.info(kScales).type : call.info(kRows).type;
  for_floats(call.info(kRows).type, scales, [&](auto zero, auto scale) {
    run<decltype(zero), decltype(scale)>(call, slots);
  });
}

}  // namespace

extern const Spec moe_finalize_routing_v2 = {
    kName,
    {
        {"expanded_x", "N H | E C H"},
        {"expanded_row_idx", "N", Kind::indices},
        {"x1", "T H", Kind::floats, true},
        {"x2", "T H", Kind::floats, true},
        bias_input(),
        scales_input(),
        expert_idx_input(),
    },
    {{"out", "T H"}},
    {{"drop_pad_mode", "int", "0, 1, 2 or 3", 0, 3}},
    shapes,
    compute,
    missing,
    mixes,
};

}  // namespace moe
