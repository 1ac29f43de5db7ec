// MoeGroupedMatmul: the rows of each expert times its own weight, see card.md beside this file.

#include <cstring>

#include "../native/groups.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeGroupedMatmul";
enum Input { kX, kWeight, kSizes };

void mixes(const Infos& inputs) { require_same_dtype(kName, "x", inputs[kX], "weight", inputs[kWeight]); }

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  Axes axes(kName);
  axes.read({{"x", inputs[kX], "N H"},
             {"weight", inputs[kWeight], attributes["transpose_weight"] ? "E F H" : "E H F"},
             {"group_sizes", inputs[kSizes], "E"}});
  check_no_rows_without_groups(kName, axes);
  const Type type = inputs[kX].type == Type::undefined ? inputs[kWeight].type : inputs[kX].type;
  return {TensorInfo(type, {axes['N'], axes['F']})};
}

// Up to so many rows the runtime's product spends more time on putting the weight into panels than on the product.
constexpr std::int64_t kFewRows = 64;

// The rows of one expert, few of them, its weight, and where their product goes.
struct Few {
  const float* x;
  const float* weight;
  float* y;
  std::int64_t rows;
};

// The products of groups of few rows, on the session's threads.
void multiply_few(const Call& call, const std::vector<Few>& groups, std::int64_t hidden, std::int64_t width) {
  // So many columns are read in one go, from one row of the weight to the next; fewer where there are few groups.
  const std::int64_t each = groups.size() < 8 ? 512 : 4096;
  const std::int64_t parts = (width + each - 1) / each;
  call.parallel(std::int64_t(groups.size()) * parts, hidden * std::min(width, each) * 4,
                [&, parts](std::int64_t begin, std::int64_t end) {
                  for (std::int64_t at = begin; at < end; ++at) {
                    const Few& one = groups[std::size_t(at / parts)];
                    const std::int64_t from = at % parts * each, columns = std::min(width - from, each);
                    row_table().few_rows(one.y + from, std::size_t(width), one.x, std::size_t(hidden),
                                         std::size_t(one.rows), one.weight + from, std::size_t(width),
                                         std::size_t(hidden), std::size_t(columns));
                  }
                });
}

// y = left * right, or left * right transposed.
template <typename T>
void multiply(const Call& call, T* y, const T* left, const T* right, bool transposed, std::int64_t rows,
              std::int64_t width, std::int64_t hidden, std::vector<T>& scratch) {
  const MatMuls& products = *call.node.products;
  if (rows <= kFewRows && transposed) {
    // The other way round it is the rows that the runtime puts into panels, and the weight is read as it lies.
    T* const other = room(scratch, width * rows);
    products.multiply(call.context(), right, false, left, true, other, width, rows, hidden);
    return turn(call, y, other, width, rows);
  }
  if constexpr (std::is_same_v<T, float>) {
    if (rows <= kFewRows) return multiply_few(call, {{left, right, y, rows}}, hidden, width);
  }
  products.multiply(call.context(), left, false, right, transposed, y, rows, width, hidden);
}

template <typename T>
void run(Call& call) {
  const bool transposed = call.attributes["transpose_weight"] != 0;
  const std::int64_t rows = call.size(kX, 0), hidden = call.size(kX, 1), experts = call.size(kSizes, 0);
  const std::vector<std::int64_t> shape = call.output_shape(0);
  const std::int64_t width = shape[1];
  const auto starts = group_starts(kName, call.input<std::int32_t>(kSizes), experts, rows);
  T* const y = call.output<T>(0, shape);
  if (y == nullptr || rows == 0 || width == 0) return;
  if (hidden == 0) {
    std::memset(static_cast<void*>(y), 0, std::size_t(rows * width) * sizeof(T));
    return;
  }
  const T *const x = call.input<T>(kX), *const weight = call.input<T>(kWeight);
  std::vector<Wide<T>> of_x, of_weight, of_y, scratch;
  std::vector<Few> few;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const std::int64_t start = starts[std::size_t(expert)], count = starts[std::size_t(expert) + 1] - start;
    if (count == 0) continue;  // the weight of an expert without rows is not looked at
    T* const out = y + start * width;
    if constexpr (std::is_same_v<T, float>) {
      if (count <= kFewRows && !transposed) {  // all such groups at once; those of 16 bits are widened one by one
        few.push_back({x + start * hidden, weight + expert * hidden * width, out, count});
        continue;
      }
    }
    const Wide<T>* const left = widened(call, x + start * hidden, count * hidden, of_x);
    const Wide<T>* const right = widened(call, weight + expert * hidden * width, hidden * width, of_weight);
    Wide<T>* const product = wide_place(out, count * width, of_y);
    multiply(call, product, left, right, transposed, count, width, hidden, scratch);
    narrowed(call, out, product, count * width);
  }
  if (!few.empty()) multiply_few(call, few, hidden, width);
}

void compute(Call& call) {
  for_float(call.info(kX).type, [&](auto zero) { run<decltype(zero)>(call); });
}

}  // namespace

extern const Spec moe_grouped_matmul = {
    kName,
    {{"x", "N H"}, {"weight", "E H F | E F H"}, {"group_sizes", "E", Kind::indices}},
    {{"y", "N F"}},
    {transpose_weight_attribute()},
    shapes,
    compute,
    nullptr,
    mixes,
    true,
};

}  // namespace moe
