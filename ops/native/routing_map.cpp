#include "routing_map.h"

#include <algorithm>

#include "indices.h"

namespace moe {

namespace {

// Numbers as they are, also those that are no sizes.
std::string show_list(const std::vector<std::int64_t>& values) {
  std::string text;
  for (const std::int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

}  // namespace

void require_companion(const char* op, const char* name, bool is_there, const char* beside) {
  if (is_there) return;
  throw Error("MissingInputError", kOther,
              words(op, ": '", name, "' is missing although '", beside, "' is given. Pass it, or leave out '", beside,
                    "'."));
}

void check_probs_dtype(const char* op, const char* tokens_name, const TensorInfo& tokens, const TensorInfo& probs,
                       const char* name) {
  if (tokens.type == Type::bfloat16 && probs.type == Type::float32) return;
  require_same_dtype(op, tokens_name, tokens, name, probs, ", or be float32 beside bfloat16");
}

void check_limits(const char* op, const Axes& axes, bool padded) {
  const Dim &top_k = axes['K'], &capacity = axes['C'], &experts = axes['E'], &tokens = axes['T'];
  if (padded) {
    if (capacity.known() && tokens.known() && capacity.value > tokens.value) {
      LimitError(op, ": expert capacity C = N / E must be at most the number of tokens, got C = ", capacity.value,
                 " and T = ", tokens.value, ".");
    }
    return;
  }
  if (!top_k.known()) return;
  if (top_k.value > kMaxTopK) {
    LimitError(op, ": top_k = N / T must be at most ", kMaxTopK, ", got ", top_k.value, ".");
  }
  if (experts.known() && top_k.value > experts.value) {
    LimitError(op, ": top_k = N / T must be at most the number of experts, got top_k = ", top_k.value,
               " and E = ", experts.value, ".");
  }
}

void check_sizes(const char* op, const char* name, const std::vector<std::int64_t>& sizes) {
  if (std::all_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size >= 0; })) return;
  AttributeValueError(op, ": attribute '", name, "' must be integers >= 0, got ", show_list(sizes), ".");
}

void check_restore_shape(const char* op, const std::vector<std::int64_t>& restore, const char* name,
                         const TensorInfo& tensor) {
  if (restore.empty() || !tensor.ranked) return;
  bool fits = restore.size() == tensor.shape.size();
  for (std::size_t i = 0; fits && i < restore.size(); ++i) {
    fits = !tensor.shape[i].known() || tensor.shape[i].value == restore[i];
  }
  if (fits) return;
  ShapeError(op, ": attribute 'restore_shape' must be the shape of '", name, "', ", show(tensor.shape), ", got ",
             show_list(restore), ".");
}

void check_selected(const char* op, std::int64_t token, std::int64_t count, std::int64_t top_k) {
  if (count <= top_k) return;
  RoutingMapError(op, ": 'routing_map' may select at most top_k = N / T = ", top_k, " experts per token, got ", count,
                  " for token ", token, ".");
}

std::vector<std::int64_t> slot_cells(const char* op, const std::int8_t* map, std::int64_t tokens,
                                     std::int64_t experts, std::int64_t top_k) {
  std::vector<std::int64_t> cells(std::size_t(tokens * top_k), -1);
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::int64_t count = 0;
    for_selected(map + token * experts, experts, [&](std::int64_t expert) {
      if (count < top_k) cells[std::size_t(token * top_k + count)] = token * experts + expert;
      ++count;
    });
    check_selected(op, token, count, top_k);
  }
  return cells;
}

std::vector<std::int64_t> row_cells(const char* op, const std::int8_t* map, std::int64_t tokens,
                                    std::int64_t experts, std::int64_t num_rows) {
  // Where each expert's pairs begin, so that the map is read by rows, as it lies.
  std::vector<std::int64_t> next(std::size_t(experts), 0);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for_selected(map + token * experts, experts, [&](std::int64_t expert) { ++next[std::size_t(expert)]; });
  }
  const std::int64_t pairs = to_starts(next);
  if (pairs > num_rows) {
    RoutingMapError(op, ": 'routing_map' may select at most N = ", num_rows, " (expert, token) pairs, got ", pairs,
                    ".");
  }
  std::vector<std::int64_t> cells(std::size_t(num_rows), -1);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for_selected(map + token * experts, experts, [&](std::int64_t expert) {
      cells[std::size_t(next[std::size_t(expert)]++)] = token * experts + expert;
    });
  }
  return cells;
}

}  // namespace moe
