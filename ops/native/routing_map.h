// What the routing-map operators share, as moe_onnx/operators/_routing_map.py: which cell of [T, E] each slot and
// each row stands for. A cell is t*E + e, the flat position of token t and expert e in the map and in probs.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "spec.h"

namespace moe {

inline Attr restore_shape_attribute() { return {"restore_shape", "ints", ""}; }

// With `beside`, an input must be there too.
void require_companion(const char* op, const char* name, bool is_there, const char* beside = "probs");

// `probs` (called `name`) has the dtype of the tokens, or is float32 beside bfloat16 tokens.
void check_probs_dtype(const char* op, const char* tokens_name, const TensorInfo& tokens, const TensorInfo& probs,
                       const char* name = "probs");

// top_k <= 512 and top_k <= E without padding, C <= T with it.
void check_limits(const char* op, const Axes& axes, bool padded);

// Refuses sizes below 0 in an attribute.
void check_sizes(const char* op, const char* name, const std::vector<std::int64_t>& sizes);

// `restore_shape`, where given, is the shape of the unpermuted tensor.
void check_restore_shape(const char* op, const std::vector<std::int64_t>& restore, const char* name,
                         const TensorInfo& tensor);

// action(expert) for each expert that one token selects, ascending. `chosen` is the token's row of the map.
template <typename Action>
void for_selected(const std::int8_t* chosen, std::int64_t experts, const Action& action) {
  std::int64_t expert = 0;
  for (; expert + 8 <= experts; expert += 8) {
    std::uint64_t eight;  // most are 0 where there are many experts
    std::memcpy(&eight, chosen + expert, sizeof eight);
    if (eight == 0) continue;
    for (std::int64_t i = expert; i < expert + 8; ++i) {
      if (chosen[i] != 0) action(i);
    }
  }
  for (; expert < experts; ++expert) {
    if (chosen[expert] != 0) action(expert);
  }
}

// A token selects at most top_k experts.
void check_selected(const char* op, std::int64_t token, std::int64_t count, std::int64_t top_k);

// Cell of each slot, [T*top_k]: slot (t, k) stands for the k-th selected expert of t, ascending; -1 where there is
// none. The map is [tokens, experts], selected where not 0.
std::vector<std::int64_t> slot_cells(const char* op, const std::int8_t* map, std::int64_t tokens,
                                     std::int64_t experts, std::int64_t top_k);

// Cells in the order of rows: selected (expert, token) pairs by expert, then token; -1 from their number on, up to
// num_rows.
std::vector<std::int64_t> row_cells(const char* op, const std::int8_t* map, std::int64_t tokens,
                                    std::int64_t experts, std::int64_t num_rows);

}  // namespace moe
