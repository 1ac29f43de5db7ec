// MoeInitRoutingV2: tokens are copied to the rows of their experts, in expert order, see card.md beside this file.

#include <algorithm>
#include <cstring>

#include "../native/indices.h"
#include "../native/operator.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeInitRoutingV2";
constexpr const char* kCountFlag = "expert_tokens_count_or_cumsum_flag";
constexpr const char* kBeforeFlag = "expert_tokens_before_capacity_flag";
enum Input { kX, kExperts };
enum Output { kRows, kIndex, kCounts, kBefore };

void require_positive(const Attributes& attributes, const char* name, bool padded) {
  if (attributes[name] >= 1) return;
  const char* const why = padded ? "with drop_pad_mode 1" : "with expert_tokens_count_or_cumsum_flag > 0";
  AttributeValueError(kName, ": attribute '", name, "' must be > 0 ", why, ", got ", attributes[name], ".");
}

Dim product(const Dim& a, const Dim& b) {
  if (!a.known() || !b.known()) return {};
  // Shapes in a model may be anything; no tensor has a size beyond 64 bits.
  if (a.value != 0 && b.value > INT64_MAX / a.value) return {};
  return a.value * b.value;
}

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  const std::int64_t experts = attributes["expert_num"], capacity = attributes["expert_capacity"];
  const std::int64_t active = attributes["active_num"];
  const bool padded = attributes["drop_pad_mode"] == 1, counted = attributes[kCountFlag] > 0;
  if (padded || counted) require_positive(attributes, "expert_num", padded);
  if (padded) require_positive(attributes, "expert_capacity", padded);
  Axes axes(kName);
  axes.read({{"x", inputs[kX], "T H"}, {"expert_idx", inputs[kExperts], "T K"}});
  const Dim tokens = axes['T'];
  if (padded && tokens.known() && tokens.value > 0 && capacity > tokens.value) {
    LimitError(kName, ": expert_capacity must be at most the number of tokens, got expert_capacity = ", capacity,
               " and T = ", tokens.value, ".");
  }
  if (padded && capacity > kMaxRows / experts) {
    LimitError(kName, ": expert_num * expert_capacity must be at most ", kMaxRows,
               ", as rows are named by int32, got ", experts, " * ", capacity, ".");
  }
  const Dim slots = product(tokens, axes['K']);
  Dim rows = slots;
  if (active) rows = slots.known() ? Dim(std::min(active, slots.value)) : Dim();
  const std::int64_t counts = counted && !padded ? experts : 0;
  const std::int64_t before = padded && attributes[kBeforeFlag] ? experts : 0;
  return {
      TensorInfo(inputs[kX].type, padded ? Dims{experts, capacity, axes['H']} : Dims{rows, axes['H']}),
      TensorInfo(Type::int32, {slots}),
      TensorInfo(Type::int32, {counts}),
      TensorInfo(Type::int32, {before}),
  };
}

// The buckets of a counting sort: one for each expert up to the last that is chosen or, where ids are far apart, one
// for each id that occurs.
class Buckets {
 public:
  Buckets(const std::int32_t* experts, std::int64_t slots) {
    const std::int64_t end = slots ? std::int64_t(*std::max_element(experts, experts + slots)) + 1 : 0;
    constexpr std::int64_t kFew = 1 << 16;
    if (end > std::max(kFew, slots)) {
      ids_.assign(experts, experts + slots);
      std::sort(ids_.begin(), ids_.end());
      ids_.erase(std::unique(ids_.begin(), ids_.end()), ids_.end());
    }
    counts_.resize(ids_.empty() ? std::size_t(end) : ids_.size());
    for (std::int64_t slot = 0; slot < slots; ++slot) ++counts_[of(experts[slot])];
  }

  std::size_t of(std::int32_t expert) const {
    if (ids_.empty()) return std::size_t(expert);
    return std::size_t(std::lower_bound(ids_.begin(), ids_.end(), expert) - ids_.begin());
  }

  std::int64_t count(std::int32_t expert) const {
    const std::size_t bucket = of(expert);
    const bool is_chosen = bucket < counts_.size() && (ids_.empty() || ids_[bucket] == expert);
    return is_chosen ? counts_[bucket] : 0;
  }

  const std::vector<std::int64_t>& counts() const { return counts_; }

 private:
  std::vector<std::int32_t> ids_;  // ascending; empty where buckets are named by the experts themselves
  std::vector<std::int64_t> counts_;
};

// The row of each slot; with a capacity -1 for slots beyond it. Rows are of 64 bits here: there may be more slots
// than int32 can name.
std::vector<std::int64_t> place(const std::int32_t* experts, std::int64_t slots, const Buckets& buckets,
                                std::int64_t capacity) {
  std::vector<std::int64_t> next(buckets.counts().size(), 0);
  if (capacity == 0) {
    next = buckets.counts();
    to_starts(next);
  }
  std::vector<std::int64_t> rows(static_cast<std::size_t>(slots));
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const std::int64_t rank = next[buckets.of(experts[slot])]++;
    const bool is_dropped = capacity > 0 && rank >= capacity;
    rows[std::size_t(slot)] = is_dropped ? -1 : experts[slot] * capacity + rank;
  }
  return rows;
}

// Slots of each expert, or of all up to it.
void write_counts(std::int32_t* out, std::int64_t experts, const Buckets& buckets, bool summed) {
  std::int64_t total = 0;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const std::int64_t count = buckets.count(std::int32_t(expert));
    total = summed ? total + count : count;
    out[expert] = std::int32_t(total);
  }
}

// Rows of an expert from its number of slots on are filled by nobody.
void zero_unfilled(const Call& call, char* rows, std::int64_t bytes, const Buckets& buckets, std::int64_t experts,
                   std::int64_t capacity) {
  call.parallel(experts * capacity, bytes, [=, &buckets](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t expert = begin / capacity, last = std::min(end, (expert + 1) * capacity);
      const std::int64_t filled = std::min(buckets.count(std::int32_t(expert)), capacity);
      const std::int64_t first = std::max(begin, expert * capacity + filled);
      if (first < last) std::memset(rows + first * bytes, 0, std::size_t((last - first) * bytes));
      begin = last;
    }
  });
}

std::int64_t bytes_of(Type type) {
  return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2;
}

void compute(Call& call) {
  const bool padded = call.attributes["drop_pad_mode"] == 1;
  const std::int64_t tokens = call.size(kX, 0), top_k = call.size(kExperts, 1), slots = tokens * top_k;
  const std::int64_t bytes = call.size(kX, 1) * bytes_of(call.info(kX).type);
  const std::int64_t num_experts = call.attributes["expert_num"], flag = call.attributes[kCountFlag];
  const std::int64_t capacity = padded ? call.attributes["expert_capacity"] : 0;
  const auto* const experts = call.input<std::int32_t>(kExperts);
  check_range({kName, "expert_idx", experts, slots, top_k}, 0, num_experts ? num_experts : kMaxRows + 1,
              "an expert, expert_num 0 is any");
  const Buckets buckets(experts, slots);
  const std::vector<std::int64_t> row_of_slot = place(experts, slots, buckets, capacity);
  char* const out = call.output<char>(kRows, call.output_shape(kRows));
  auto* const index = call.output<std::int32_t>(kIndex, call.output_shape(kIndex));
  auto* const counts = call.output<std::int32_t>(kCounts, call.output_shape(kCounts));
  auto* const before = call.output<std::int32_t>(kBefore, call.output_shape(kBefore));
  if (index != nullptr) {
    std::transform(row_of_slot.begin(), row_of_slot.end(), index, [](std::int64_t row) { return std::int32_t(row); });
  }
  if (counts != nullptr && flag > 0 && !padded) write_counts(counts, num_experts, buckets, flag == 1);
  if (before != nullptr && padded && call.attributes[kBeforeFlag]) {
    write_counts(before, num_experts, buckets, false);
  }
  if (out == nullptr || bytes == 0) return;
  const std::int64_t num_rows = padded ? num_experts * capacity : call.output_shape(kRows)[0];
  const char* const x = call.input<char>(kX);
  const std::int64_t* const rows = row_of_slot.data();
  // By tokens: a token's row stays in the cache for all its copies.
  call.parallel(tokens, (top_k + 1) * bytes, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      for (std::int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
        const std::int64_t row = rows[slot];
        if (row < 0 || row >= num_rows) continue;  // dropped, or behind the active rows
        row_table().copy(out + row * bytes, x + token * bytes, std::size_t(bytes));
      }
    }
  });
  if (padded) zero_unfilled(call, out, bytes, buckets, num_experts, capacity);
}

}  // namespace

extern const Spec moe_init_routing_v2 = {
    kName,
    {{"x", "T H"}, {"expert_idx", "T K", Kind::indices}},
    {
        {"expanded_x", "R H | E C H"},
        {"expanded_row_idx", "N", Kind::indices},
        {"expert_tokens_count_or_cumsum", "E", Kind::indices, true},
        {"expert_tokens_before_capacity", "E", Kind::indices, true},
    },
    {
        {"active_num", "int", ">= 0", 0, INT64_MAX},
        {"expert_capacity", "int", ">= 0", 0, INT64_MAX},
        {"expert_num", "int", "in [0, 2^31)", 0, kMaxRows},
        switch_attribute("drop_pad_mode"),
        {kCountFlag, "int", "0, 1 or 2", 0, 2},
        switch_attribute(kBeforeFlag),
    },
    shapes,
    compute,
};

}  // namespace moe
