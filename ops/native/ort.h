// ONNX Runtime's C functions by name, and owners for what they hand out.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "ort_abi.h"

namespace moe {

// Set once, by RegisterCustomOps.
extern const OrtApi* ort_api;

namespace ort {

#define MOE_CALL(name, slot, result, arguments)                           \
  template <typename... Arguments>                                        \
  inline result name(Arguments... values) {                               \
    return ort_api->at<result(*) arguments>(slot)(values...);             \
  }
MOE_ORT_FUNCTIONS(MOE_CALL)
#undef MOE_CALL

// The runtime refused a call: its own words.
struct Failure : std::exception {
  explicit Failure(std::string words) : text(std::move(words)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};

// The words of a status, which is released; empty where there is none.
inline std::string take_message(OrtStatus* status) {
  if (status == nullptr) return {};
  std::string words = GetErrorMessage(status);
  ReleaseStatus(status);
  return words.empty() ? "onnxruntime gave no reason" : words;
}

inline void check(OrtStatus* status) {
  if (status != nullptr) throw Failure(take_message(status));
}

template <typename Handle, void (*release)(Handle*)>
struct Release {
  void operator()(Handle* handle) const { release(handle); }
};

template <typename Handle, void (*release)(Handle*)>
using Owner = std::unique_ptr<Handle, Release<Handle, release>>;

inline void release_shape(OrtTensorTypeAndShapeInfo* info) { ReleaseTensorTypeAndShapeInfo(info); }
inline void release_attribute(OrtOpAttr* attribute) { ReleaseOpAttr(attribute); }
inline void release_op(OrtOp* op) { ReleaseOp(op); }
inline void release_memory(OrtMemoryInfo* info) { ReleaseMemoryInfo(info); }
inline void release_value(OrtValue* value) { ReleaseValue(value); }

using ShapeInfo = Owner<OrtTensorTypeAndShapeInfo, release_shape>;
using Attribute = Owner<OrtOpAttr, release_attribute>;
using Op = Owner<OrtOp, release_op>;
using MemoryInfo = Owner<OrtMemoryInfo, release_memory>;
using Value = Owner<OrtValue, release_value>;

}  // namespace ort
}  // namespace moe
