// Tokens that are sums of rows, as the combine makes them and the gradient of the dispatch.
#pragma once

#include <algorithm>
#include <vector>

#include "operator.h"

namespace moe {

// The rows that each token adds up, one list of a token behind the other, and their weights if there are any.
template <typename T>
struct TokenSums {
  std::vector<const T*> rows;
  std::vector<Wide<T>> weights;
  std::vector<std::int64_t> start;  // of each token, and the end

  void add(const T* row) { rows.push_back(row); }
  void add(const T* row, Wide<T> weight) {
    rows.push_back(row);
    weights.push_back(weight);
  }

  // out is [tokens, hidden]; nothing is done where it is null.
  void write(const Call& call, T* out, std::int64_t tokens, std::int64_t hidden) const {
    if (out == nullptr || hidden == 0) return;
    const std::int64_t rows_each = std::int64_t(rows.size()) / std::max<std::int64_t>(tokens, 1);
    const std::int64_t bytes = (rows_each + 1) * hidden * std::int64_t(sizeof(T));
    call.parallel(tokens, bytes, [&, out, hidden](std::int64_t begin, std::int64_t end) {
      for (std::int64_t token = begin; token < end; ++token) {
        const std::int64_t first = start[std::size_t(token)];
        const std::size_t count = std::size_t(start[std::size_t(token) + 1] - first), width = std::size_t(hidden);
        if (weights.empty()) {
          rows_of<T>().sum(out + token * hidden, rows.data() + first, count, width);
        } else {
          rows_of<T>().weighted_sum(out + token * hidden, rows.data() + first, weights.data() + first, count, width);
        }
      }
    });
  }
};

}  // namespace moe
