// What the finalize-routing operators share, as moe_onnx/operators/_slots.py: the slots of [T, K], their rows, scales,
// experts and biases.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "spec.h"

namespace moe {

inline Arg scales_input() { return {"scales", "T K", Kind::floats, true}; }
inline Arg expert_idx_input() { return {"expert_idx", "T K", Kind::indices, true}; }
inline Arg bias_input() { return {"bias", "E H", Kind::floats, true}; }

struct Named {
  const char* name;
  const TensorInfo& info;
};

// All floats have the dtype of the rows (called `name`), but for `scales`, float32 beside bfloat16.
void check_slot_dtypes(const char* op, const char* name, const TensorInfo& rows, const TensorInfo& scales,
                       std::initializer_list<Named> others);

// N = T * K, and K = 1 without scales.
void bind_slots(Axes& axes, const TensorInfo& scales);

// The row of each slot (token, k): an index of checked values in [-1, ...), of which those below `rows` are rows.
struct Slots {
  const std::int32_t* index;
  std::int64_t tokens;
  std::int64_t top_k;
  std::int64_t rows;
  bool by_column = false;

  // -1 where the slot has no row.
  std::int64_t row(std::int64_t token, std::int64_t k) const {
    const std::int64_t row = index[by_column ? k * tokens + token : token * top_k + k];
    return row < rows ? row : -1;
  }
};

// The expert of each slot that has a row has a bias; what stands at the others is not read.
void check_experts(const char* op, const std::int32_t* expert_idx, std::int64_t experts, const Slots& slots);

}  // namespace moe
