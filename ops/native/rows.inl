// The row functions, compiled once for each instruction set: MOE_ROWS names the table to be defined.
//
// Written with the vector extensions of GCC and Clang. Only internal linkage here, see number.h.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

#include "rows.h"

namespace moe {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kFloats = kBytes / 4;

typedef float Floats __attribute__((vector_size(kBytes)));
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef std::uint32_t Words __attribute__((vector_size(kBytes)));
typedef std::int32_t Signed __attribute__((vector_size(kBytes)));
typedef std::uint16_t Halves __attribute__((vector_size(kBytes / 2)));

// A vector of the wide type, and how many elements it has.
template <typename T>
struct Vector {
  using type = Floats;
  static constexpr int size = kFloats;
};
template <>
struct Vector<double> {
  using type = Doubles;
  static constexpr int size = kFloats / 2;
};

inline Floats load(const float* in) {
  Floats out;
  std::memcpy(&out, in, sizeof out);
  return out;
}

inline Doubles load(const double* in) {
  Doubles out;
  std::memcpy(&out, in, sizeof out);
  return out;
}

// Compilers split conversions between 16 and 32 bits in two where one instruction does it.
inline Words widen_bits(Halves bits) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu16_epi32(__mmask16(-1), (__m256i)bits);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, Words);
#endif
}

// Of numbers below 2^16.
inline Halves narrow_bits(Words bits) {
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_cvtepi32_epi16(__mmask16(-1), (__m512i)bits);
#elif defined(__AVX2__)
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
#else
  return __builtin_convertvector(bits, Halves);
#endif
}

inline Floats load(const bfloat16* in) {
  Halves bits;
  std::memcpy(&bits, in, sizeof bits);
  return (Floats)(widen_bits(bits) << 16);
}

inline Floats load(const float16* in) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(__mmask16(-1), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
#else
  Floats out;
  for (int i = 0; i < kFloats; ++i) out[i] = widen(in[i]);
  return out;
#endif
}

inline void store(float* out, Floats value) { std::memcpy(out, &value, sizeof value); }
inline void store(double* out, Doubles value) { std::memcpy(out, &value, sizeof value); }

inline void store(bfloat16* out, Floats value) {
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = (bits >> 16) | 0x40;
  const Words is_nan = (Words)((Signed)(bits & 0x7fffffff) > (Signed)(Words{} + 0x7f800000));
  const Halves halves = narrow_bits((nan & is_nan) | (rounded & ~is_nan));
  std::memcpy(out, &halves, sizeof halves);
}

inline void store(float16* out, Floats value) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_maskz_cvtps_ph(__mmask16(-1), (__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(out, &halves, sizeof halves);
#elif defined(__AVX2__)
  const __m128i halves = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(out, &halves, sizeof halves);
#else
  for (int i = 0; i < kFloats; ++i) narrow(value[i], out[i]);
#endif
}

// Elements that are made side by side, so that the sums stay in registers.
constexpr int kTogether = 4;

// All sums: `weights` and `biases` are null where they are not asked for.
template <bool weighted, bool biased, typename T>
void add_up(T* out, const T* const* rows, const T* const* biases, const Wide<T>* weights, std::size_t count,
            std::size_t width) {
  using V = typename Vector<T>::type;
  constexpr std::size_t size = Vector<T>::size;
  constexpr std::size_t step = size * kTogether;
  std::size_t i = 0;
  for (; i + step <= width; i += step) {
    V total[kTogether] = {};
    for (std::size_t k = 0; k < count; ++k) {
      V row[kTogether];
      for (int j = 0; j < kTogether; ++j) row[j] = load(rows[k] + i + j * size);
      if (biased && biases[k] != nullptr) {
        for (int j = 0; j < kTogether; ++j) row[j] += load(biases[k] + i + j * size);
      }
      for (int j = 0; j < kTogether; ++j) {
        if constexpr (weighted) {
          total[j] += row[j] * weights[k];
        } else {
          total[j] += row[j];
        }
      }
    }
    for (int j = 0; j < kTogether; ++j) store(out + i + j * size, total[j]);
  }
  for (; i < width; ++i) {
    Wide<T> total = 0;
    for (std::size_t k = 0; k < count; ++k) {
      Wide<T> row = widen(rows[k][i]);
      if (biased && biases[k] != nullptr) row += widen(biases[k][i]);
      if constexpr (weighted) row *= weights[k];
      total += row;
    }
    narrow(total, out[i]);
  }
}

template <typename T>
void sum(T* out, const T* const* rows, std::size_t count, std::size_t width) {
  add_up<false, false, T>(out, rows, nullptr, nullptr, count, width);
}

template <typename T>
void weighted_sum(T* out, const T* const* rows, const Wide<T>* weights, std::size_t count, std::size_t width) {
  add_up<true, false, T>(out, rows, nullptr, weights, count, width);
}

template <typename T>
void biased_sum(T* out, const T* const* rows, const T* const* biases, const Wide<T>* weights, std::size_t count,
                std::size_t width) {
  add_up<true, true, T>(out, rows, biases, weights, count, width);
}

template <typename T>
void scale(T* out, const T* in, Wide<T> weight, std::size_t width) {
  constexpr std::size_t size = Vector<T>::size;
  std::size_t i = 0;
  for (; i + size <= width; i += size) store(out + i, load(in + i) * weight);
  for (; i < width; ++i) narrow(widen(in[i]) * weight, out[i]);
}

constexpr int kLanes = 32;

// The sum of the lanes, in a tree that does not depend on the width of vectors.
template <int count = kLanes, typename W>
W fold(W* lanes) {
  for (int half = count / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Both products: `bias` is null where there is none.
template <bool biased, typename T>
Wide<T> multiply(const T* a, const T* bias, const T* b, std::size_t width) {
  using V = typename Vector<T>::type;
  constexpr int size = Vector<T>::size;
  V total[kLanes / size] = {};
  std::size_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (int j = 0; j < kLanes / size; ++j) {
      V left = load(a + i + j * size);
      if constexpr (biased) left += load(bias + i + j * size);
      total[j] += left * load(b + i + j * size);
    }
  }
  Wide<T> lanes[kLanes];
  std::memcpy(lanes, total, sizeof lanes);
  for (int lane = 0; i < width; ++i, ++lane) {
    Wide<T> left = widen(a[i]);
    if constexpr (biased) left += widen(bias[i]);
    lanes[lane] += left * widen(b[i]);
  }
  return fold(lanes);
}

template <typename T>
Wide<T> dot(const T* a, const T* b, std::size_t width) {
  return multiply<false, T>(a, nullptr, b, width);
}

template <typename T>
Wide<T> biased_dot(const T* a, const T* bias, const T* b, std::size_t width) {
  return multiply<true, T>(a, bias, b, width);
}

template <typename T>
void widen_all(Wide<T>* out, const T* in, std::size_t count) {
  constexpr std::size_t size = Vector<T>::size;
  std::size_t i = 0;
  for (; i + size <= count; i += size) store(out + i, load(in + i));
  for (; i < count; ++i) out[i] = widen(in[i]);
}

template <typename T>
void narrow_all(T* out, const Wide<T>* in, std::size_t count) {
  constexpr std::size_t size = Vector<T>::size;
  std::size_t i = 0;
  for (; i + size <= count; i += size) store(out + i, load(in + i));
  for (; i < count; ++i) narrow(in[i], out[i]);
}

void copy(void* out, const void* in, std::size_t bytes) {
  if (bytes) std::memcpy(out, in, bytes);
}

// As many bytes as are one vector of this table, or fewer, past the caches; `out` is a multiple of them.
template <std::size_t bytes>
void stream(void* out, const void* in) {
#if defined(__AVX512F__)
  if constexpr (bytes == 64) return _mm512_stream_si512(static_cast<__m512i*>(out), _mm512_loadu_si512(in));
#endif
#if defined(__AVX2__)
  if constexpr (bytes == 32) {
    return _mm256_stream_si256(static_cast<__m256i*>(out), _mm256_loadu_si256(static_cast<const __m256i*>(in)));
  }
#endif
#if defined(__x86_64__) || defined(_M_X64)
  if constexpr (bytes == 16) {
    return _mm_stream_si128(static_cast<__m128i*>(out), _mm_loadu_si128(static_cast<const __m128i*>(in)));
  }
#endif
  std::memcpy(out, in, bytes);
}

// What was streamed is in no order with other stores: others may read it only after this.
inline void end_of_stream() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_sfence();
#endif
}

void copy_past(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const std::size_t head = (0 - reinterpret_cast<std::uintptr_t>(to)) % kLine;
  if (bytes < head + kLine) return copy(to, from, bytes);
  copy(out, in, head);
  std::size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    for (std::size_t j = 0; j < kLine; j += kBytes) stream<kBytes>(out + i + j, in + i + j);
  }
  copy(out + i, in + i, bytes - i);
  end_of_stream();
}

// A vector of results past the caches; `out` is a multiple of what is written.
template <typename T, typename V>
void store_past(T* out, V value) {
  constexpr std::size_t bytes = sizeof(T) * sizeof(V) / sizeof(Wide<T>);
  alignas(bytes) T made[bytes / sizeof(T)];
  store(made, value);
  stream<bytes>(out, made);
}

template <typename T>
void scale_past(T* out, const T* in, Wide<T> weight, std::size_t width) {
  constexpr std::size_t size = Vector<T>::size;
  // What comes before the first whole vector of the output and behind the last is made alone.
  std::size_t i = 0;
  for (; i < width && reinterpret_cast<std::uintptr_t>(out + i) % kBytes != 0; ++i) {
    narrow(widen(in[i]) * weight, out[i]);
  }
  for (; i + size <= width; i += size) store_past(out + i, load(in + i) * weight);
  for (; i < width; ++i) narrow(widen(in[i]) * weight, out[i]);
  end_of_stream();
}

// The bits of `dot`, and of `scale`. One pass, so that the memory reads while it writes.
template <bool past, typename T>
Wide<T> scaled_dot(T* out, const T* in, Wide<T> weight, const T* other, const T* next, std::size_t width) {
  using V = typename Vector<T>::type;
  constexpr int size = Vector<T>::size;
  V total[kLanes / size] = {};
  std::size_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    // The next row is somewhere else, which no processor foresees.
    for (std::size_t line = 0; line < kLanes * sizeof(T); line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(next + i) + line);
    }
    for (int j = 0; j < kLanes / size; ++j) {
      const V value = load(in + i + j * size);
      total[j] += load(other + i + j * size) * value;
      if constexpr (past) {
        store_past(out + i + j * size, value * weight);
      } else {
        store(out + i + j * size, value * weight);
      }
    }
  }
  Wide<T> lanes[kLanes];
  std::memcpy(lanes, total, sizeof lanes);
  for (int lane = 0; i < width; ++i, ++lane) {
    lanes[lane] += widen(other[i]) * widen(in[i]);
    narrow(widen(in[i]) * weight, out[i]);
  }
  return fold(lanes);
}

template <typename T>
Wide<T> scale_and_dot(T* out, const T* in, Wide<T> weight, const T* other, const T* next, std::size_t width,
                      bool past) {
  constexpr std::size_t kVector = Vector<T>::size * sizeof(T);
  if (!past || reinterpret_cast<std::uintptr_t>(out) % kVector != 0) {
    return scaled_dot<false>(out, in, weight, other, next, width);
  }
  const Wide<T> dot = scaled_dot<true>(out, in, weight, other, next, width);
  end_of_stream();
  return dot;
}

inline Floats root(Floats value) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_sqrt_ps(__mmask16(-1), (__m512)value);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)value);
#else
  for (int i = 0; i < kFloats; ++i) value[i] = std::sqrt(value[i]);
  return value;
#endif
}

inline Doubles root(Doubles value) {
  for (int i = 0; i < kFloats / 2; ++i) value[i] = std::sqrt(value[i]);
  return value;
}

inline float root(float value) { return std::sqrt(value); }
inline double root(double value) { return std::sqrt(value); }

// A vector or an element: V is either. All is loaded before anything is stored, as outputs may be inputs.
template <typename V, typename T>
inline void adam_w_at(const AdamW<T>& by, T* const (&out)[3], const T* parameter, const T* gradient, const T* exp_avg,
                      const T* exp_avg_sq, std::size_t i) {
  V p, g, m, v;
  std::memcpy(&p, parameter + i, sizeof p);
  std::memcpy(&g, gradient + i, sizeof g);
  std::memcpy(&m, exp_avg + i, sizeof m);
  std::memcpy(&v, exp_avg_sq + i, sizeof v);
  m = m * by.beta1 + g * by.weight1;
  v = v * by.beta2 + (g * g) * by.weight2;
  p = p * by.kept - (m * by.rate) / (root(v) + by.eps);
  if (out[0] != nullptr) std::memcpy(out[0] + i, &p, sizeof p);
  if (out[1] != nullptr) std::memcpy(out[1] + i, &m, sizeof m);
  if (out[2] != nullptr) std::memcpy(out[2] + i, &v, sizeof v);
}

template <typename T>
void adam_w(const AdamW<T>& by, T* const (&out)[3], const T* parameter, const T* gradient, const T* exp_avg,
            const T* exp_avg_sq, std::size_t count) {
  constexpr std::size_t size = Vector<T>::size;
  std::size_t i = 0;
  for (; i + size <= count; i += size) {
    adam_w_at<typename Vector<T>::type>(by, out, parameter, gradient, exp_avg, exp_avg_sq, i);
  }
  for (; i < count; ++i) adam_w_at<T>(by, out, parameter, gradient, exp_avg, exp_avg_sq, i);
}

#include "swi_glu.inl"
#include "turn.inl"
#include "few_rows.inl"
#include "square_sum.inl"

template <typename T>
constexpr Rows<T> rows_for() {
  return {sum<T>,        weighted_sum<T>,  biased_sum<T>, scale<T>,        scale_past<T>, dot<T>,
          biased_dot<T>, scale_and_dot<T>, swi_glu<T>,    swi_glu_grad<T>, turn<T>,       widen_all<T>,
          narrow_all<T>};
}

}  // namespace

#define MOE_STRING(name) #name
#define MOE_NAME(name) MOE_STRING(name)
extern const RowTable MOE_ROWS = {
    MOE_NAME(MOE_ROWS), rows_for<float>(), rows_for<float16>(), rows_for<bfloat16>(), rows_for<double>(), copy, copy_past,
    adam_w<float>,      adam_w<double>, few_rows, square_sum<float>, square_sum<double>,
};

}  // namespace moe
