// What an operator refuses, in the words of the Python package.
//
// The texts are those of moe_onnx/spec.py and moe_onnx/operators/: a test holds the two together. In front stands
// the class that moe_onnx raises, behind it the aclnn status of the source documents.
#pragma once

#include <exception>
#include <string>
#include <utility>

namespace moe {

struct Error : std::exception {
  Error(const char* kind, int aclnn_status, std::string words)
      : text(std::string(kind) + " (aclnn " + std::to_string(aclnn_status) + "): " + std::move(words)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};

constexpr int kMissing = 161001;
constexpr int kBadDtype = 161002;
constexpr int kOther = 561002;


// One text of pieces; numbers in decimal.
inline std::string piece(const std::string& value) { return value; }
inline std::string piece(const char* value) { return value; }
template <typename Number>
std::string piece(Number value) {
  return std::to_string(value);
}
template <typename... Pieces>
std::string words(const Pieces&... pieces) {
  return (std::string() + ... + piece(pieces));
}

#define MOE_ERROR(name, status)                                             \
  template <typename... Pieces>                                             \
  [[noreturn]] void name(const Pieces&... pieces) {                         \
    throw Error(#name, status, words(pieces...));                           \
  }
MOE_ERROR(MissingInputError, kMissing)
MOE_ERROR(DtypeError, kBadDtype)
MOE_ERROR(AttributeValueError, kOther)
MOE_ERROR(RankError, kOther)
MOE_ERROR(ShapeError, kOther)
MOE_ERROR(LimitError, kOther)
MOE_ERROR(IndexValueError, kOther)
MOE_ERROR(RoutingMapError, kOther)
#undef MOE_ERROR

}  // namespace moe
