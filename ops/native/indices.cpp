#include "indices.h"

#include "errors.h"

namespace moe {

namespace {

std::string position(const Index& index, std::int64_t at) {
  if (index.columns == 0) return words("[", at, "]");
  return words("[", at / index.columns, ", ", at % index.columns, "]");
}

}  // namespace

void out_of_range(const Index& index, std::int64_t at, std::int64_t low, std::int64_t high, const char* mode) {
  const std::string legal = high > low ? words("in [", low, ", ", high, ")") : "absent: the legal range is empty";
  IndexValueError(index.op, ": '", index.name, "' values must be ", legal, " (", mode, "), got ", index.values[at],
                  " at position ", position(index, at), ". Check how the indices were made.");
}

void check_range(const Index& index, std::int64_t low, std::int64_t high, const char* mode) {
  for (std::int64_t i = 0; i < index.count; ++i) {
    if (index.values[i] < low || index.values[i] >= high) out_of_range(index, i, low, high, mode);
  }
}

Bits check_unique(const Index& index, std::int64_t rows, const char* why) {
  Bits named(rows);
  for (std::int64_t i = 0; i < index.count; ++i) {
    const std::int32_t value = index.values[i];
    if (value < 0) continue;
    if (!named[value]) {
      named.set(value);
      continue;
    }
    std::int64_t first = 0;
    while (index.values[first] != value) ++first;
    IndexValueError(index.op, ": '", index.name, "' values must be unique apart from -1 (", why, "), got ", value,
                    " at position [", first, "] and again at position [", i, "].");
  }
  return named;
}

std::int64_t to_starts(std::vector<std::int64_t>& sizes) {
  std::int64_t end = 0;
  for (std::int64_t& part : sizes) {
    const std::int64_t size = part;
    part = end;
    end += size;
  }
  return end;
}

Groups::Groups(const std::int32_t* values, std::int64_t count, std::int64_t size)
    : order(std::size_t(count)), start(std::size_t(size) + 1) {
  for (std::int64_t i = 0; i < count; ++i) ++start[std::size_t(values[i])];
  std::int64_t end = 0;
  for (std::int64_t& place : start) {
    end += place;
    place = end;
  }
  // From the ends down, which leaves each value's start.
  for (std::int64_t i = count; i-- > 0;) order[std::size_t(--start[std::size_t(values[i])])] = std::int32_t(i);
}

}  // namespace moe
