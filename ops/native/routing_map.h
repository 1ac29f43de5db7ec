// What the routing-map operators share, as moe_onnx/operators/_routing_map.py: which cell of [T, E] each slot and
// each row stands for. A cell is t*E + e, the flat position of token t and expert e in the map and in probs.
#pragma once

#include <cstdint>
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

// `restore_shape`, where given, is the shape of the unpermuted tensor.
void check_restore_shape(const char* op, const std::vector<std::int64_t>& restore, const char* name,
                         const TensorInfo& tensor);

// Cell of each slot, [T*top_k]: slot (t, k) stands for the k-th selected expert of t, ascending; -1 where there is
// none. The map is [tokens, experts], selected where not 0.
std::vector<std::int64_t> slot_cells(const char* op, const std::int8_t* map, std::int64_t tokens,
                                     std::int64_t experts, std::int64_t top_k);

// Cells in the order of rows: selected (expert, token) pairs by expert, then token; -1 from their number on, up to
// num_rows.
std::vector<std::int64_t> row_cells(const char* op, const std::int8_t* map, std::int64_t tokens,
                                    std::int64_t experts, std::int64_t num_rows);

}  // namespace moe
