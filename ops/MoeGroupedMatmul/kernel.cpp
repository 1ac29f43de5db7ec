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
  std::vector<Wide<T>> of_x, of_weight, of_y;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const std::int64_t start = starts[std::size_t(expert)], count = starts[std::size_t(expert) + 1] - start;
    if (count == 0) continue;  // the weight of an expert without rows is not looked at
    T* const out = y + start * width;
    const Wide<T>* const left = widened(call, x + start * hidden, count * hidden, of_x);
    const Wide<T>* const right = widened(call, weight + expert * hidden * width, hidden * width, of_weight);
    Wide<T>* const product = wide_place(out, count * width, of_y);
    call.node.products->multiply(call.context(), left, false, right, transposed, product, count, width, hidden);
    narrowed(call, out, product, count * width);
  }
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
