// MoeSquareSum: the sum of the squares of all elements, see card.md beside this file.

#include "../native/operator.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeSquareSum";
enum Input { kX };
// Each block is summed up by itself, and the blocks' sums in order: the same bits at any number of threads.
constexpr std::int64_t kBlock = 1 << 15;

Infos shapes(const Infos& inputs, const Attributes&) {
  Axes axes(kName);
  axes.read({{"x", inputs[kX], kAny}});
  return {TensorInfo(inputs[kX].type, Dims())};
}

template <typename T>
void run(Call& call, SquareSum<T> sum) {
  T* const y = call.output<T>(0, {});
  if (y == nullptr) return;
  const T* const x = call.input<T>(kX);
  const std::int64_t count = call.elements(kX), blocks = (count + kBlock - 1) / kBlock;
  std::vector<double> sums(std::size_t(blocks), 0.0);
  call.parallel(blocks, kBlock * std::int64_t(sizeof(T)), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t at = block * kBlock;
      sums[std::size_t(block)] = sum(x + at, std::size_t(std::min(kBlock, count - at)));
    }
  });
  double total = 0;
  for (const double one : sums) total += one;
  *y = T(total);
}

void compute(Call& call) {
  if (call.info(kX).type == Type::float64) return run<double>(call, row_table().square_sum_f64);
  run<float>(call, row_table().square_sum_f32);
}

}  // namespace

extern const Spec moe_square_sum = {
    kName, {{"x", kAny, Kind::masters}}, {{"y", "", Kind::masters}}, {}, shapes, compute};

}  // namespace moe
