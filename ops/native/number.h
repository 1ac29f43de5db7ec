// Element types and their exact conversions to and from the type that sums are made in.
//
// Everything here has internal linkage: rows.inl is compiled for several instruction sets, and a function shared
// between them could be the one that an older processor cannot run.
#pragma once

#include <cstdint>
#include <cstring>

namespace moe {

struct float16 {
  std::uint16_t bits;
};
struct bfloat16 {
  std::uint16_t bits;
};

// What sums are made in: float32 for all but float64.
template <typename T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};
template <typename T>
using Wide = typename WideOf<T>::type;

static inline float from_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline std::uint32_t to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float widen(float value) { return value; }
static inline double widen(double value) { return value; }
static inline float widen(bfloat16 value) { return from_bits(std::uint32_t(value.bits) << 16); }

static inline float widen(float16 value) {
  const std::uint32_t sign = std::uint32_t(value.bits & 0x8000u) << 16;
  const std::uint32_t rest = value.bits & 0x7fffu;
  if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | (rest & 0x3ffu) << 13);  // infinity, NaN
  // A subnormal half is a multiple of 2^-24; a normal one needs its exponent moved by 112.
  if (rest < 0x400u) return from_bits(sign | to_bits(float(rest) * 5.9604644775390625e-8f));
  return from_bits(sign | ((rest << 13) + (112u << 23)));
}

static inline void narrow(float value, float& out) { out = value; }
static inline void narrow(double value, double& out) { out = value; }

// Rounded to nearest, ties to even; a NaN stays one.
static inline void narrow(float value, bfloat16& out) {
  const std::uint32_t bits = to_bits(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out.bits = std::uint16_t(is_nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline void narrow(float value, float16& out) {
  const std::uint32_t bits = to_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t rest = bits & 0x7fffffffu;
  std::uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u | ((rest >> 13) & 0x3ffu);
  } else if (rest >= 0x477ff000u) {  // 65520, half way to what would follow the largest half
    half = 0x7c00u;
  } else if (rest >= 0x38800000u) {  // 2^-14, the smallest normal half
    half = (rest - (112u << 23) + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  } else {
    // Adding 0.5 puts a multiple of 2^-24 into the last bits of the sum, rounded as it should be.
    half = to_bits(from_bits(rest) + 0.5f) - 0x3f000000u;
  }
  out.bits = std::uint16_t(sign | half);
}

}  // namespace moe
