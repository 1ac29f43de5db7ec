// What is done to whole rows, by the widest instructions that this processor has.
//
// Results do not depend on which: sums are made element by element in the order given, and a dot product adds up
// 32 interleaved sums in a fixed tree, whatever the width. The products of `few_rows` alone have other bits where the
// processor adds a product with one rounding. No function checks anything or allocates.
#pragma once

#include <cstddef>

#include "number.h"

namespace moe {

constexpr std::size_t kTurnedRows = 16;

template <typename T>
struct Rows {
  // out = sum of `count` rows in order, from +0, rounded once.
  void (*sum)(T* out, const T* const* rows, std::size_t count, std::size_t width);
  // out = sum of `count` rows, each times its weight; every product is rounded to the wide type.
  void (*weighted_sum)(T* out, const T* const* rows, const Wide<T>* weights, std::size_t count, std::size_t width);
  // The same of rows that have a bias added first; a null bias adds nothing.
  void (*biased_sum)(T* out, const T* const* rows, const T* const* biases, const Wide<T>* weights, std::size_t count,
                     std::size_t width);
  // out = in * weight
  void (*scale)(T* out, const T* in, Wide<T> weight, std::size_t width);
  void (*scale_past)(T* out, const T* in, Wide<T> weight, std::size_t width);  // past the caches
  // sum of a * b
  Wide<T> (*dot)(const T* a, const T* b, std::size_t width);
  // sum of (a + bias) * b
  Wide<T> (*biased_dot)(const T* a, const T* bias, const T* b, std::size_t width);
  // Both at once: out = in * weight, and the sum of in * other. `next` is the row that will be `other` next; nothing
  // is read of it.
  Wide<T> (*scale_and_dot)(T* out, const T* in, Wide<T> weight, const T* other, const T* next, std::size_t width,
                           bool past_the_caches);
  // out = gate / (1 + exp(-gate)) * up, and its gradient of both, for MoeSwiGlu.
  void (*swi_glu)(T* out, const T* gate, const T* up, std::size_t width);
  void (*swi_glu_grad)(T* of_gate, T* of_up, const T* grad, const T* gate, const T* up, std::size_t width);
  // out[column * out_stride + row] = in[row * in_stride + column], for at most kTurnedRows rows.
  void (*turn)(T* out, std::size_t out_stride, const T* in, std::size_t in_stride, std::size_t height,
               std::size_t width);
  // Exact widening and one rounding back.
  void (*widen)(Wide<T>* out, const T* in, std::size_t count);
  void (*narrow)(T* out, const Wide<T>* in, std::size_t count);
};

// The factors of MoeAdamW, in their order.
template <typename T>
struct AdamW {
  T beta1, weight1, beta2, weight2, rate, eps, kept;
};

// One pass over `count` elements: those of a new parameter and its moments, of the old ones and the gradient. Each
// operation is rounded once. Outputs may be the inputs of the same place; null ones are not written.
template <typename T>
using AdamWStep = void (*)(const AdamW<T>& by, T* const (&out)[3], const T* parameter, const T* gradient,
                           const T* exp_avg, const T* exp_avg_sq, std::size_t count);

// y = x * matrix, for rows so few that reading the matrix is what takes the time; `inner` is above 0.
using FewRows = void (*)(float* y, std::size_t y_stride, const float* x, std::size_t x_stride, std::size_t rows,
                         const float* matrix, std::size_t matrix_stride, std::size_t inner, std::size_t columns);

// The sum of squares, made in double precision.
template <typename T>
using SquareSum = double (*)(const T* in, std::size_t count);

struct RowTable {
  const char* name;
  Rows<float> f32;
  Rows<float16> f16;
  Rows<bfloat16> bf16;
  Rows<double> f64;
  // Copies bytes.
  void (*copy)(void* out, const void* in, std::size_t bytes);
  void (*copy_past)(void* out, const void* in, std::size_t bytes);  // past the caches
  AdamWStep<float> adam_w_f32;
  AdamWStep<double> adam_w_f64;
  FewRows few_rows;
  SquareSum<float> square_sum_f32;
  SquareSum<double> square_sum_f64;
};

// An output of so many bytes is out of the caches before anyone reads it. Written past them, its lines are not read
// from memory first, which is half of the traffic.
#ifndef ASCEND_MOE_PAST_BYTES  // smaller in tests
#define ASCEND_MOE_PAST_BYTES (std::size_t(32) << 20)
#endif
constexpr std::size_t kPastCaches = ASCEND_MOE_PAST_BYTES;

extern const RowTable rows_baseline;
#if defined(ASCEND_MOE_AVX2)
extern const RowTable rows_avx2;
extern const RowTable rows_avx512;
#endif

// The table of this processor. The environment variable ASCEND_MOE_VECTORS names another one, for tests.
const RowTable& row_table();

template <typename T>
const Rows<T>& rows_of();
template <>
inline const Rows<float>& rows_of<float>() { return row_table().f32; }
template <>
inline const Rows<float16>& rows_of<float16>() { return row_table().f16; }
template <>
inline const Rows<bfloat16>& rows_of<bfloat16>() { return row_table().bf16; }
template <>
inline const Rows<double>& rows_of<double>() { return row_table().f64; }

}  // namespace moe
