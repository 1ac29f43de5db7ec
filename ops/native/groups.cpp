#include "groups.h"

namespace moe {

void check_no_rows_without_groups(const char* op, const Axes& axes) {
  const Dim& rows = axes['N'];
  if (axes['E'].is(0) && rows.value > 0) {
    ShapeError(op, ": without groups (axis E, experts, is 0 in 'group_sizes') axis N must be 0, got ", rows.value,
               ". Give the rows a group, or no rows.");
  }
}

std::vector<std::int64_t> group_starts(const char* op, const std::int32_t* sizes, std::int64_t groups,
                                       std::int64_t rows) {
  check_range({op, "group_sizes", sizes, groups}, 0, rows + 1, "rows of one expert");
  std::vector<std::int64_t> starts{0};
  std::int64_t total = 0;
  for (std::int64_t at = 0; at < groups; ++at) total += sizes[at];
  for (std::int64_t at = 0; at < groups; ++at) {
    const std::int64_t size = sizes[at], left = rows - starts.back();
    // The first group that takes more rows than are left, or the last one if it leaves some.
    if (size > left || (at == groups - 1 && size < left)) {
      const std::string legal = size > left ? words("in [0, ", left + 1, ")") : words(left);
      IndexValueError(op, ": 'group_sizes' must sum to the number of rows N = ", rows, ", their sum is ", total,
                      ": with the groups before it the value must be ", legal, ", got ", size, " at position [", at,
                      "]. Check how the rows were counted.");
    }
    starts.push_back(starts.back() + size);
  }
  return starts;
}

}  // namespace moe
