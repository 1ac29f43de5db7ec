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

}  // namespace moe
