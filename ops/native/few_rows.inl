// Part of rows.inl: the product of a few rows and a matrix that is read once, from memory rather than from a cache.
//
// The runtime's own product first copies the matrix into panels, whole, which for 32 rows costs as much again as the
// product. Here a tile of it is copied, small enough for the first cache, and all rows are multiplied by it.

inline Floats splat(float value) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX2__)
  return (Floats)_mm256_set1_ps(value);
#else
  Floats out;
  for (int i = 0; i < kFloats; ++i) out[i] = value;
  return out;
#endif
}

// a * b + c, rounded once where the processor can: the bits of these products are not promised.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

constexpr std::size_t kDeep = 16;              // rows of the matrix in a tile
constexpr std::size_t kPanel = 2 * kFloats;    // columns that are summed up in registers
constexpr std::size_t kTileColumns = 256;
static_assert(kTileColumns % kPanel == 0, "tiles are whole panels");

// kPanel columns of `rows` rows of y, by a panel of the tile; they start at 0 or go on.
template <int rows, bool starts>
inline void panel_product(float* y, std::size_t y_stride, const float* x, std::size_t x_stride, const float* panel,
                          std::size_t depth) {
  Floats left[rows], right[rows];
  for (int row = 0; row < rows; ++row) {
    left[row] = starts ? Floats{} : load(y + row * y_stride);
    right[row] = starts ? Floats{} : load(y + row * y_stride + kFloats);
  }
  for (std::size_t k = 0; k < depth; ++k) {
    const Floats a = load(panel + k * kPanel), b = load(panel + k * kPanel + kFloats);
    for (int row = 0; row < rows; ++row) {
      const Floats factor = splat(x[row * x_stride + k]);
      left[row] = multiply_add(factor, a, left[row]);
      right[row] = multiply_add(factor, b, right[row]);
    }
  }
  for (int row = 0; row < rows; ++row) {
    store(y + row * y_stride, left[row]);
    store(y + row * y_stride + kFloats, right[row]);
  }
}

// The same of fewer columns.
template <int rows, bool starts>
inline void part_product(float* y, std::size_t y_stride, const float* x, std::size_t x_stride, const float* panel,
                         std::size_t depth, std::size_t columns) {
  float part[rows][kPanel] = {};
  for (int row = 0; row < rows; ++row) std::copy_n(y + row * y_stride, starts ? 0 : columns, part[row]);
  panel_product<rows, starts>(part[0], kPanel, x, x_stride, panel, depth);
  for (int row = 0; row < rows; ++row) std::copy_n(part[row], columns, y + row * y_stride);
}

template <int rows, bool starts>
inline void tile_product(float* y, std::size_t y_stride, const float* x, std::size_t x_stride, const float* tile,
                         std::size_t depth, std::size_t columns) {
  std::size_t from = 0;
  for (; from + kPanel <= columns; from += kPanel) {
    panel_product<rows, starts>(y + from, y_stride, x, x_stride, tile + from * kDeep, depth);
  }
  if (from < columns) {
    part_product<rows, starts>(y + from, y_stride, x, x_stride, tile + from * kDeep, depth, columns - from);
  }
}

template <int rows>
void tile_product(float* y, std::size_t y_stride, const float* x, std::size_t x_stride, const float* tile,
                  std::size_t depth, std::size_t columns, bool starts) {
  if (starts) return tile_product<rows, true>(y, y_stride, x, x_stride, tile, depth, columns);
  tile_product<rows, false>(y, y_stride, x, x_stride, tile, depth, columns);
}

void few_rows(float* y, std::size_t y_stride, const float* x, std::size_t x_stride, std::size_t rows,
              const float* matrix, std::size_t matrix_stride, std::size_t inner, std::size_t columns) {
  alignas(64) float tile[kDeep * kTileColumns];
  for (std::size_t k = 0; k < inner; k += kDeep) {
    const std::size_t depth = std::min(kDeep, inner - k);
    for (std::size_t from = 0; from < columns; from += kTileColumns) {
      const std::size_t width = std::min(kTileColumns, columns - from);
      // The tile after this one is asked for before this one is worked on.
      const bool is_last = from + kTileColumns >= columns;
      const std::size_t next_k = is_last ? k + kDeep : k, next_from = is_last ? 0 : from + kTileColumns;
      for (std::size_t i = 0; i < depth; ++i) {
        const float* const line = matrix + (k + i) * matrix_stride + from;
        const float* const next = next_k + i < inner ? matrix + (next_k + i) * matrix_stride + next_from : line;
        for (std::size_t at = 0; at < width; at += 16) __builtin_prefetch(next + at, 0, 2);
        for (std::size_t at = 0; at < width; at += kPanel) {
          float* const panel = tile + at * kDeep + i * kPanel;
          if (at + kPanel <= width) {
            store(panel, load(line + at));
            store(panel + kFloats, load(line + at + kFloats));
          } else {
            std::fill(std::copy_n(line + at, width - at, panel), panel + kPanel, 0.0f);
          }
        }
      }
      std::size_t row = 0;
      for (; row + 4 <= rows; row += 4) {
        tile_product<4>(y + row * y_stride + from, y_stride, x + row * x_stride + k, x_stride, tile, depth, width,
                        k == 0);
      }
      for (; row < rows; ++row) {
        tile_product<1>(y + row * y_stride + from, y_stride, x + row * x_stride + k, x_stride, tile, depth, width,
                        k == 0);
      }
    }
  }
}
