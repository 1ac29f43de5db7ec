// MoeFinalizeRoutingV2Grad: the gradient of the combine by index, for rows and for scales, see card.md beside this file.

#include <cstring>

#include "../native/indices.h"
#include "../native/operator.h"
#include "../native/routing_map.h"
#include "../native/slots.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeFinalizeRoutingV2Grad";
enum Input { kGrad, kIndex, kRows, kScales, kExperts, kBias };

bool is_padded(const Attributes& attributes) { return attributes["drop_pad_mode"] == 1; }

// The letters of the rows' leading sizes that attributes give, and of which attribute each is.
struct Size {
  char letter;
  const char* attribute;
};

std::vector<Size> leading_sizes(const Attributes& attributes) {
  if (is_padded(attributes)) return {{'E', "expert_num"}, {'C', "expert_capacity"}};
  if (attributes["active_num"]) return {{'A', "active_num"}};
  return {};
}

void missing(const Infos& inputs, const Attributes&) {
  const TensorInfo &grad = inputs[kGrad], &rows = inputs[kRows];
  if (presence(inputs[kScales]) == Presence::yes) {
    // (0, 0) may be the shape that expanded_x must have, if there are no rows and H is 0.
    const bool no_width = grad.ranked && !grad.shape.empty() && grad.shape.back().is(0);
    require_companion(kName, "expanded_x", rows.there && (no_width || !rows.empty_pair()), "scales");
  }
  if (presence(inputs[kBias]) == Presence::yes) {
    require_companion(kName, "expert_idx", presence(inputs[kExperts]) != Presence::no, "bias");
  }
}

void mixes(const Infos& inputs) {
  check_slot_dtypes(kName, "grad_y", inputs[kGrad], inputs[kScales],
                    {{"expanded_x", inputs[kRows]}, {"bias", inputs[kBias]}});
}

// Rows are named by int32.
void check_number_of_rows(const Axes& axes, const std::vector<Size>& sizes) {
  std::string names, values;
  std::int64_t rows = 1;
  bool is_above = false;
  for (const Size& size : sizes) {
    const Dim& dim = axes[size.letter];
    if (!dim.known()) return;
    const char* const times = names.empty() ? "" : " * ";
    names += words(times, size.attribute);
    values += words(times, dim.value);
    is_above = dim.value > 0 && (is_above || rows > kMaxRows / dim.value);
    rows = is_above ? rows : rows * dim.value;
  }
  if (!is_above) return;
  LimitError(kName, ": ", names, " must be at most ", kMaxRows, ", as rows are named by int32, got ", values, ".");
}

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  const TensorInfo &grad = inputs[kGrad], &rows = inputs[kRows], &scales = inputs[kScales];
  const Presence scaled = presence(scales);
  const std::vector<Size> sizes = leading_sizes(attributes);
  for (const Size& size : sizes) {
    if (attributes[size.attribute] < 1 && presence(rows) == Presence::no) {
      AttributeValueError(kName, ": attribute '", size.attribute,
                          "' must be > 0 with drop_pad_mode 1 and without 'expanded_x', got ",
                          attributes[size.attribute], ".");
    }
  }
  Axes axes(kName);
  axes.read({{"grad_y", grad, "T H"},
             {"expanded_row_idx", inputs[kIndex], "N"},
             // Beside scales (0, 0) is no absent input: it is right, or an error.
             {"expanded_x", scaled == Presence::yes ? rows : where_present(rows),
              sizes.empty() ? "N H" : sizes.size() == 1 ? "A H" : "E C H"},
             {"scales", where_present(scales), "T K"},
             {"expert_idx", where_present(inputs[kExperts]), "T K"},
             {"bias", where_present(inputs[kBias]), "E H"}});
  for (const Size& size : sizes) {
    const std::int64_t value = attributes[size.attribute];
    axes.bind(size.letter, value ? Dim(value) : Dim(), words("attribute '", size.attribute, "'"));
  }
  bind_slots(axes, scales);
  check_number_of_rows(axes, sizes);
  Dims shape;
  for (const Size& size : sizes) shape.push_back(axes[size.letter]);
  if (shape.empty()) shape.push_back(axes['N']);
  shape.push_back(axes['H']);
  const TensorInfo grad_rows(grad.type, shape);
  if (scaled != Presence::yes) return {grad_rows, scales};
  return {grad_rows, TensorInfo(scales.type, {axes['T'], axes['K']})};
}

// The slots, and which rows have one.
struct Plan {
  Slots slots;
  std::int64_t hidden;
  std::int64_t named_end;  // no row from here on has a slot
  Bits named;

  bool has_slot(std::int64_t row) const { return row < named_end && named[row]; }
  bool is_past_caches(std::size_t element) const {
    return std::size_t(slots.rows) * std::size_t(hidden) * element >= kPastCaches;
  }
};

template <typename T>
void copy_rows(Call& call, const Plan& plan) {
  T* const out = call.output<T>(0, call.output_shape(0));
  call.output<T>(1, call.output_shape(1));
  if (out == nullptr) return;
  const T* const grad = call.input<T>(kGrad);
  const std::int64_t bytes = plan.hidden * std::int64_t(sizeof(T));
  const auto copy = plan.is_past_caches(sizeof(T)) ? row_table().copy_past : row_table().copy;
  call.parallel(plan.slots.tokens, 2 * bytes, [=, &plan](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      const std::int64_t row = plan.slots.row(token, 0);
      if (row >= 0) copy(out + row * plan.hidden, grad + token * plan.hidden, std::size_t(bytes));
    }
  });
  zero_unnamed(call, out, plan.slots.rows, bytes, [&](std::int64_t row) { return plan.has_slot(row); });
}

template <typename T, typename P>
void weigh_rows(Call& call, const Plan& plan) {
  T* const out = call.output<T>(0, call.output_shape(0));
  P* const grad_scales = call.output<P>(1, call.output_shape(1));
  const T *const grad = call.input<T>(kGrad), *const rows = call.input<T>(kRows);
  const P* const scales = call.input<P>(kScales);
  const T* const bias = call.is_given(kBias) ? call.input<T>(kBias) : nullptr;
  const auto* const experts = call.input<std::int32_t>(kExperts);
  const Slots& slots = plan.slots;
  const std::int64_t hidden = plan.hidden, bytes = (3 * slots.top_k + 1) * hidden * std::int64_t(sizeof(T));
  const std::size_t width = std::size_t(hidden);
  const bool past = plan.is_past_caches(sizeof(T));
  const Rows<T>& table = rows_of<T>();
  const auto scale = past ? table.scale_past : table.scale;
  call.parallel(slots.tokens, bytes, [=, &table](std::int64_t begin, std::int64_t end) {
    for (std::int64_t slot = begin * slots.top_k, token = begin; token < end; ++token) {
      const T* const moved = grad + token * hidden;
      for (std::int64_t k = 0; k < slots.top_k; ++k, ++slot) {
        const std::int64_t row = slots.row(token, k);
        if (row < 0) {
          if (grad_scales != nullptr) narrow(Wide<T>(0), grad_scales[slot]);
          continue;
        }
        const Wide<T> weight = widen(scales[slot]);
        T* const to = out + row * hidden;
        const T* const from = rows + row * hidden;
        if (grad_scales == nullptr) {
          scale(to, moved, weight, width);
        } else if (bias != nullptr) {
          scale(to, moved, weight, width);
          narrow(table.biased_dot(from, bias + experts[slot] * hidden, moved, width), grad_scales[slot]);
        } else {
          const std::int64_t next = slot + 1 < end * slots.top_k ? std::int64_t(slots.index[slot + 1]) : row;
          const T* const ahead = next >= 0 && next < slots.rows ? rows + next * hidden : from;
          narrow(table.scale_and_dot(to, moved, weight, from, ahead, width, past), grad_scales[slot]);
        }
      }
    }
  });
  if (out == nullptr) return;
  const std::int64_t row_bytes = hidden * std::int64_t(sizeof(T));
  zero_unnamed(call, out, slots.rows, row_bytes, [&](std::int64_t row) { return plan.has_slot(row); });
}

Plan prepare(const Call& call) {
  const bool padded = is_padded(call.attributes);
  const std::vector<std::int64_t> shape = call.output_shape(0);
  const std::int64_t rows = padded ? shape[0] * shape[1] : shape[0], count = call.size(kIndex, 0);
  const Index index{kName, "expanded_row_idx", call.input<std::int32_t>(kIndex), count};
  if (padded) {
    check_range(index, -1, rows, "drop/pad, -1 is a dropped slot");
  } else {
    const bool active = call.attributes["active_num"] != 0;
    check_range(index, 0, count, active ? "active, drop_pad_mode 0" : "dropless, drop_pad_mode 0");
  }
  const std::int64_t end = count ? *std::max_element(index.values, index.values + count) + std::int64_t(1) : 0;
  const std::int64_t top_k = call.is_given(kScales) ? call.size(kScales, 1) : 1;
  Plan plan{{index.values, call.size(kGrad, 0), top_k, rows}, shape.back(), end,
            check_unique(index, end, "each slot has a row of its own")};
  if (call.is_given(kScales) && call.is_given(kBias)) {
    check_experts(kName, call.input<std::int32_t>(kExperts), call.size(kBias, 0), plan.slots);
  }
  return plan;
}

void compute(Call& call) {
  const Plan plan = prepare(call);
  const Type rows = call.info(kGrad).type;
  if (!call.is_given(kScales)) {
    for_float(rows, [&](auto zero) { copy_rows<decltype(zero)>(call, plan); });
    return;
  }
  for_floats(rows, call.info(kScales).type, [&](auto zero, auto scale) {
    weigh_rows<decltype(zero), decltype(scale)>(call, plan);
  });
}

Attr count_attribute(const char* name) { return {name, "int", ">= 0", 0, INT64_MAX}; }

}  // namespace

extern const Spec moe_finalize_routing_v2_grad = {
    kName,
    {
        {"grad_y", "T H"},
        {"expanded_row_idx", "N", Kind::indices},
        {"expanded_x", "N H | A H | E C H", Kind::floats, true},
        scales_input(),
        expert_idx_input(),
        bias_input(),
    },
    {{"grad_expanded_x", "N H | A H | E C H"}, {"grad_scales", "T K", Kind::floats, true, kScales}},
    {
        {"drop_pad_mode", "int", "0 or 1", 0, 1},
        count_attribute("active_num"),
        count_attribute("expert_num"),
        count_attribute("expert_capacity"),
    },
    shapes,
    compute,
    missing,
    mixes,
};

}  // namespace moe
