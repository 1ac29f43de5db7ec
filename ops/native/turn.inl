// Part of rows.inl: the transpose of a few rows, for products that want their left side turned.

#if defined(__AVX2__)
// Eight by eight: pairs of elements, then of pairs, then halves change places.
inline void turn_square(float* out, std::size_t out_stride, const float* in, std::size_t in_stride) {
  __m256 rows[8], pairs[8], fours[8];
  for (std::size_t i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(in + i * in_stride);
  for (std::size_t i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (std::size_t i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    _mm256_storeu_ps(out + (i + 4) * out_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
  }
}
#endif

// By blocks that stay in the first cache: lines of the output lie a whole column apart, often a power of two, and
// would drive each other out before they are full. The block's own lines are a little longer for that reason.
template <typename T>
void turn(T* out, std::size_t out_stride, const T* in, std::size_t in_stride, std::size_t height, std::size_t width) {
  constexpr std::size_t broad = 64;
  alignas(64) T block[broad][kTurnedRows + 8];
  for (std::size_t from = 0; from < width; from += broad) {
    const std::size_t columns = std::min(broad, width - from);
    std::size_t square_rows = 0, square_columns = 0;
#if defined(__AVX2__)
    if constexpr (std::is_same_v<T, float>) {
      square_rows = height / 8 * 8;
      square_columns = columns / 8 * 8;
      for (std::size_t row = 0; row < square_rows; row += 8) {
        for (std::size_t column = 0; column < square_columns; column += 8) {
          turn_square(&block[column][row], kTurnedRows + 8, in + row * in_stride + from + column, in_stride);
        }
      }
    }
#endif
    for (std::size_t row = 0; row < height; ++row) {
      for (std::size_t column = row < square_rows ? square_columns : 0; column < columns; ++column) {
        block[column][row] = in[row * in_stride + from + column];
      }
    }
    for (std::size_t column = 0; column < columns; ++column) {
      std::copy_n(block[column], height, out + (from + column) * out_stride);
    }
  }
}
