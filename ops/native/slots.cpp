#include "slots.h"

#include "indices.h"
#include "routing_map.h"

namespace moe {

void check_slot_dtypes(const char* op, const char* name, const TensorInfo& rows, const TensorInfo& scales,
                       std::initializer_list<Named> others) {
  for (const Named& other : others) {
    if (presence(other.info) != Presence::no) require_same_dtype(op, name, rows, other.name, other.info);
  }
  if (presence(scales) != Presence::no) check_probs_dtype(op, name, rows, scales, "scales");
}

void bind_slots(Axes& axes, const TensorInfo& scales) {
  if (presence(scales) == Presence::no) axes.bind('K', 1, "a call without 'scales'");
  const Dim top_k = axes['K'];
  if (top_k.known()) {
    const Dim tokens = axes.divide('N', top_k, "top_k");
    // Without slots there may be any number of tokens.
    if (!top_k.is(0)) axes.bind('T', tokens, "N / K");
  } else if (!axes['T'].is(0)) {
    axes.bind('K', axes.divide('N', axes['T'], "the number of tokens"), "N / T");
  }
}

void check_experts(const char* op, const std::int32_t* expert_idx, std::int64_t experts, const Slots& slots) {
  const Index index{op, "expert_idx", expert_idx, slots.tokens * slots.top_k, slots.top_k};
  for (std::int64_t token = 0; token < slots.tokens; ++token) {
    for (std::int64_t k = 0; k < slots.top_k; ++k) {
      const std::int64_t at = token * slots.top_k + k;
      const bool is_bias = expert_idx[at] >= 0 && expert_idx[at] < experts;
      if (!is_bias && slots.row(token, k) >= 0) out_of_range(index, at, 0, experts, "an expert of 'bias'");
    }
  }
}

}  // namespace moe
