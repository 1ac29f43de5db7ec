// Checks of index values, before any of them is used.
#pragma once

#include <cstdint>
#include <vector>

namespace moe {

// One bit for each of `size` rows.
class Bits {
 public:
  explicit Bits(std::int64_t size) : words_(std::size_t((size + 63) / 64)) {}
  bool operator[](std::int64_t i) const { return words_[std::size_t(i) >> 6] >> (i & 63) & 1; }
  void set(std::int64_t i) { words_[std::size_t(i) >> 6] |= std::uint64_t(1) << (i & 63); }

 private:
  std::vector<std::uint64_t> words_;
};

// An index tensor with its name, for messages; `columns` is its last size where it is 2-D, otherwise 0.
struct Index {
  const char* op;
  const char* name;
  const std::int32_t* values;
  std::int64_t count;
  std::int64_t columns = 0;
};

// Refuses the first element outside [low, high).
void check_range(const Index& index, std::int64_t low, std::int64_t high, const char* mode);

// Refuses one element that is out of range, in the words of check_range.
[[noreturn]] void out_of_range(const Index& index, std::int64_t at, std::int64_t low, std::int64_t high,
                               const char* mode);

// Refuses a value that occurs twice, apart from -1; gives which of `rows` rows are named. All values are in
// [-1, rows).
Bits check_unique(const Index& index, std::int64_t rows, const char* why);

// Turns the sizes of parts that lie one behind the other into their starts; gives the end of the last.
std::int64_t to_starts(std::vector<std::int64_t>& sizes);

// Positions by value, a stable sort: those of value v are order[start[v]] to order[start[v + 1] - 1], ascending.
// All values are in [0, size).
struct Groups {
  Groups(const std::int32_t* values, std::int64_t count, std::int64_t size);

  std::vector<std::int32_t> order;
  std::vector<std::int64_t> start;
};

}  // namespace moe
