#include "rows.h"

#include <cstdlib>
#include <cstring>

namespace moe {

namespace {

const RowTable& best() {
#if defined(ASCEND_MOE_AVX2)
  const char* wish = std::getenv("ASCEND_MOE_VECTORS");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool half = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (wish != nullptr && std::strcmp(wish, "baseline") == 0) return rows_baseline;
  if (wish != nullptr && std::strcmp(wish, "avx2") == 0 && half) return rows_avx2;
  if (wide) return rows_avx512;
  if (half) return rows_avx2;
#endif
  return rows_baseline;
}

}  // namespace

const RowTable& row_table() {
  static const RowTable& table = best();
  return table;
}

}  // namespace moe
