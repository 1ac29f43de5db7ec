// The runtime's own matrix products, called from inside a kernel: no BLAS of our own, and the session's threads.
#pragma once

#include "ort.h"

namespace moe {

class MatMuls {
 public:
  explicit MatMuls(const OrtKernelInfo* info);

  // c[m, n] = op(a) @ op(b), all row-major and dense; a is [m, k], or [k, m] where transposed, b alike.
  template <typename T>
  void multiply(const OrtKernelContext* context, const T* a, bool transpose_a, const T* b, bool transpose_b, T* c,
                std::int64_t m, std::int64_t n, std::int64_t k) const;

 private:
  ort::MemoryInfo memory_;
  ort::Op gemms_[2][2][2];  // [float64][transpose_a][transpose_b]
};

}  // namespace moe
