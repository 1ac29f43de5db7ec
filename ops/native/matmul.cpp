#include "matmul.h"

namespace moe {

namespace {

ort::Op make_gemm(const OrtKernelInfo* info, Type type, std::int64_t transpose_a, std::int64_t transpose_b) {
  OrtOpAttr* raw[2] = {};
  ort::check(ort::CreateOpAttr("transA", static_cast<const void*>(&transpose_a), 1, AttrType::integer, &raw[0]));
  const ort::Attribute first(raw[0]);
  ort::check(ort::CreateOpAttr("transB", static_cast<const void*>(&transpose_b), 1, AttrType::integer, &raw[1]));
  const ort::Attribute second(raw[1]);
  const char* names[] = {"T"};
  OrtOp* op = nullptr;
  ort::check(ort::CreateOp(info, "Gemm", "", 13, names, &type, 1, raw, 2, 2, 1, &op));
  return ort::Op(op);
}

template <typename T>
ort::Value view(const OrtMemoryInfo* memory, const T* data, std::int64_t rows, std::int64_t columns) {
  const std::int64_t shape[] = {rows, columns};
  OrtValue* value = nullptr;
  ort::check(ort::CreateTensorWithDataAsOrtValue(
      memory, const_cast<void*>(static_cast<const void*>(data)), std::size_t(rows * columns) * sizeof(T), shape,
      std::size_t(2), sizeof(T) == 4 ? Type::float32 : Type::float64, &value));
  return ort::Value(value);
}

}  // namespace

MatMuls::MatMuls(const OrtKernelInfo* info) {
  OrtMemoryInfo* memory = nullptr;
  ort::check(ort::CreateCpuMemoryInfo(0, 0, &memory));
  memory_.reset(memory);
  for (const int a : {0, 1}) {
    for (const int b : {0, 1}) {
      gemms_[0][a][b] = make_gemm(info, Type::float32, a, b);
      gemms_[1][a][b] = make_gemm(info, Type::float64, a, b);
    }
  }
}

template <typename T>
void MatMuls::multiply(const OrtKernelContext* context, const T* a, bool transpose_a, const T* b, bool transpose_b,
                       T* c, std::int64_t m, std::int64_t n, std::int64_t k) const {
  const ort::Value left = transpose_a ? view(memory_.get(), a, k, m) : view(memory_.get(), a, m, k);
  const ort::Value right = transpose_b ? view(memory_.get(), b, n, k) : view(memory_.get(), b, k, n);
  const ort::Value product = view(memory_.get(), c, m, n);
  const OrtValue* inputs[] = {left.get(), right.get()};
  OrtValue* outputs[] = {product.get()};
  ort::check(ort::InvokeOp(context, gemms_[sizeof(T) == 8][transpose_a][transpose_b].get(), inputs, 2, outputs, 1));
}

template void MatMuls::multiply(const OrtKernelContext*, const float*, bool, const float*, bool, float*,
                                std::int64_t, std::int64_t, std::int64_t) const;
template void MatMuls::multiply(const OrtKernelContext*, const double*, bool, const double*, bool, double*,
                                std::int64_t, std::int64_t, std::int64_t) const;

}  // namespace moe
