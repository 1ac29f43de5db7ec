// What the two grouped products share, as moe_onnx/operators/_groups.py: rows in groups, one group an expert.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "indices.h"
#include "operator.h"

namespace moe {

inline Attr transpose_weight_attribute() { return switch_attribute("transpose_weight"); }

// Refuses rows where there is no expert that they could be of.
void check_no_rows_without_groups(const char* op, const Axes& axes);

// First row of each group, and behind them the number of rows; refuses sizes that are not a split of the rows.
std::vector<std::int64_t> group_starts(const char* op, const std::int32_t* sizes, std::int64_t groups,
                                       std::int64_t rows);

// At least so many elements.
template <typename T>
T* room(std::vector<T>& scratch, std::int64_t elements) {
  if (std::int64_t(scratch.size()) < elements) scratch.resize(std::size_t(elements));
  return scratch.data();
}

// A matrix as float32 (float64 for itself): where it lies, or widened into `scratch`, on the session's threads.
template <typename T>
const Wide<T>* widened(const Call& call, const T* matrix, std::int64_t elements, std::vector<Wide<T>>& scratch) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return matrix;
  } else {
    Wide<T>* const out = room(scratch, elements);
    call.parallel(elements, 6, [=](std::int64_t begin, std::int64_t end) {
      rows_of<T>().widen(out + begin, matrix + begin, std::size_t(end - begin));
    });
    return out;
  }
}

// out = the transpose of a matrix, [columns, rows], made by bands of rows on the session's threads.
template <typename T>
void turn(const Call& call, T* out, const T* matrix, std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t tall = kTurnedRows;
  const std::int64_t bands = (rows + tall - 1) / tall;
  call.parallel(bands, tall * columns * 2 * std::int64_t(sizeof(T)), [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t top = begin * tall; top < std::min(rows, end * tall); top += tall) {
      rows_of<T>().turn(out + top, std::size_t(rows), matrix + top * columns, std::size_t(columns),
                        std::size_t(std::min(tall, rows - top)), std::size_t(columns));
    }
  });
}

// Where a product of so many elements is made: in its place, or in `scratch` to be rounded from there.
template <typename T>
Wide<T>* wide_place(T* out, std::int64_t elements, std::vector<Wide<T>>& scratch) {
  if constexpr (std::is_same_v<T, Wide<T>>) {
    return out;
  } else {
    return room(scratch, elements);
  }
}

// Rounds what was made elsewhere into its place.
template <typename T>
void narrowed(const Call& call, T* out, const Wide<T>* product, std::int64_t elements) {
  if constexpr (!std::is_same_v<T, Wide<T>>) {
    call.parallel(elements, 6, [=](std::int64_t begin, std::int64_t end) {
      rows_of<T>().narrow(out + begin, product + begin, std::size_t(end - begin));
    });
  }
}

}  // namespace moe
