#include "matmul.h"

namespace moe {

namespace {

template <typename Number>
ort::Attribute attribute(const char* name, AttrType type, Number value) {
  OrtOpAttr* raw = nullptr;
  ort::check(ort::CreateOpAttr(name, static_cast<const void*>(&value), 1, type, &raw));
  return ort::Attribute(raw);
}

ort::Op make_gemm(const OrtKernelInfo* info, Type type, std::int64_t transpose_a, std::int64_t transpose_b) {
  // An operator that is invoked has no defaults: every attribute is written out.
  const ort::Attribute attributes[] = {
      attribute("alpha", AttrType::real, 1.0f),
      attribute("beta", AttrType::real, 0.0f),
      attribute("transA", AttrType::integer, transpose_a),
      attribute("transB", AttrType::integer, transpose_b),
  };
  const OrtOpAttr* raw[] = {attributes[0].get(), attributes[1].get(), attributes[2].get(), attributes[3].get()};
  const char* names[] = {"T"};
  OrtOp* op = nullptr;
  ort::check(ort::CreateOp(info, "Gemm", "", 13, names, &type, 1, raw, 4, 2, 1, &op));
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
