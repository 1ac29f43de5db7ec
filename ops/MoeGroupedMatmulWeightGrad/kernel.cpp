// MoeGroupedMatmulWeightGrad: for each expert the sum of its rows' outer products, see card.md beside this file.

#include <cstring>

#include "../native/groups.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeGroupedMatmulWeightGrad";
enum Input { kX, kGrad, kSizes };

// The runtime's product is slower where it has to turn its left side itself: a third at 32 rows and a quarter at 512,
// which is more than a copy costs (2 threads of a Zen 3). At 4 rows the copy costs more.
constexpr std::int64_t kManyRows = 16;

void mixes(const Infos& inputs) { require_same_dtype(kName, "x", inputs[kX], "grad_y", inputs[kGrad]); }

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  Axes axes(kName);
  axes.read({{"x", inputs[kX], "N H"}, {"grad_y", inputs[kGrad], "N F"}, {"group_sizes", inputs[kSizes], "E"}});
  check_no_rows_without_groups(kName, axes);
  const Type type = inputs[kX].type == Type::undefined ? inputs[kGrad].type : inputs[kX].type;
  if (attributes["transpose_weight"]) return {TensorInfo(type, {axes['E'], axes['F'], axes['H']})};
  return {TensorInfo(type, {axes['E'], axes['H'], axes['F']})};
}

template <typename T>
void run(Call& call) {
  const bool transposed = call.attributes["transpose_weight"] != 0;
  const std::int64_t rows = call.size(kX, 0), experts = call.size(kSizes, 0);
  const auto starts = group_starts(kName, call.input<std::int32_t>(kSizes), experts, rows);
  const std::vector<std::int64_t> shape = call.output_shape(0);
  T* const grad_weight = call.output<T>(0, shape);
  const std::int64_t lines = shape[1], columns = shape[2], elements = lines * columns;
  if (grad_weight == nullptr || elements == 0) return;
  const T *const left = call.input<T>(transposed ? kGrad : kX), *const right = call.input<T>(transposed ? kX : kGrad);
  std::vector<Wide<T>> of_left, of_right, of_product, of_turned;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const std::int64_t start = starts[std::size_t(expert)], count = starts[std::size_t(expert) + 1] - start;
    T* const out = grad_weight + expert * elements;
    if (count == 0) {
      std::memset(static_cast<void*>(out), 0, std::size_t(elements) * sizeof(T));
      continue;
    }
    const Wide<T>* a = widened(call, left + start * lines, count * lines, of_left);
    const bool is_turned = count >= kManyRows;
    if (is_turned) {
      Wide<T>* const other = room(of_turned, count * lines);
      turn(call, other, a, count, lines);
      a = other;
    }
    const Wide<T>* const b = widened(call, right + start * columns, count * columns, of_right);
    Wide<T>* const product = wide_place(out, elements, of_product);
    call.node.products->multiply(call.context(), a, !is_turned, b, false, product, lines, columns, count);
    narrowed(call, out, product, elements);
  }
}

void compute(Call& call) {
  for_float(call.info(kX).type, [&](auto zero) { run<decltype(zero)>(call); });
}

}  // namespace

extern const Spec moe_grouped_matmul_weight_grad = {
    kName,
    {{"x", "N H"}, {"grad_y", "N F"}, {"group_sizes", "E", Kind::indices}},
    {{"grad_weight", "E H F | E F H"}},
    {transpose_weight_attribute()},
    shapes,
    compute,
    nullptr,
    mixes,
    true,
};

}  // namespace moe
