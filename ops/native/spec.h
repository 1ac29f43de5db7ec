// What an operator is, as data, and the checks that read it: moe_onnx/spec.py in C++.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "errors.h"
#include "ort_abi.h"

namespace moe {

constexpr std::int64_t kMaxRows = 2147483647;  // rows, tokens and experts are named by int32
constexpr std::int64_t kMaxTopK = 512;         // the source documents' limit

// A size: a number, a symbolic name, or unknown. Only numbers are ever refused.
struct Dim {
  std::int64_t value = -1;
  std::string name;

  Dim() = default;
  Dim(std::int64_t number) : value(number) {}  // NOLINT: a size is a number
  explicit Dim(std::string symbol) : name(std::move(symbol)) {}
  bool known() const { return value >= 0; }
  bool is(std::int64_t number) const { return value == number; }
};

using Dims = std::vector<Dim>;

// Dtype and shape of one input or output, as far as known. `there` is false for None.
struct TensorInfo {
  bool there = false;
  Type type = Type::undefined;
  bool ranked = false;
  Dims shape;
  std::int64_t selected = -1;  // how many elements of a routing map are non-zero, if counted

  TensorInfo() = default;
  explicit TensorInfo(Type dtype) : there(true), type(dtype) {}
  TensorInfo(Type dtype, Dims sizes) : there(true), type(dtype), ranked(true), shape(std::move(sizes)) {}
  bool empty_pair() const { return ranked && shape.size() == 2 && shape[0].is(0) && shape[1].is(0); }
};

using Infos = std::vector<TensorInfo>;

// masters: what is summed up over many steps, float32 or float64.
enum class Kind { floats, masters, indices, maps };

constexpr const char* kAny = "...";  // the signature of a tensor of any rank
bool is_any(const char* signature);

struct Arg {
  const char* name;
  const char* axes;  // the signature as the Python spec has it, for messages
  Kind kind = Kind::floats;
  bool optional = false;
  int like = 0;  // of an output that may be absent: the input whose dtype it has all the same
};

// An attribute: an integer in [low, high], a boolean, or a list of integers that the shapes check.
struct Attr {
  const char* name;
  const char* kind;  // "int", "bool" or "ints"
  const char* rule;
  std::int64_t low = 0;
  std::int64_t high = 0;
  std::int64_t fallback = 0;
  bool required = false;
};

inline Attr switch_attribute(const char* name) { return {name, "bool", "0 or 1", 0, 1, 0, false}; }

// The values of a node's attributes, defaults filled in.
class Attributes {
 public:
  std::int64_t operator[](const char* name) const { return numbers_.at(name); }
  const std::vector<std::int64_t>& list(const char* name) const { return lists_.at(name); }
  void set(const char* name, std::int64_t value) { numbers_[name] = value; }
  void set(const char* name, std::vector<std::int64_t> values) { lists_[name] = std::move(values); }

 private:
  std::map<std::string, std::int64_t, std::less<>> numbers_;
  std::map<std::string, std::vector<std::int64_t>, std::less<>> lists_;
};

class Call;

// The functions are those of the same names in moe_onnx.spec.OpSpec; `compute` does the work.
struct Spec {
  const char* name;
  std::vector<Arg> inputs;
  std::vector<Arg> outputs;
  std::vector<Attr> attributes;
  Infos (*shapes)(const Infos& inputs, const Attributes& attributes);
  void (*compute)(Call& call);
  void (*missing)(const Infos& inputs, const Attributes& attributes) = nullptr;
  void (*mixes)(const Infos& inputs) = nullptr;
  bool multiplies = false;  // needs the runtime's own matrix products

  // Checks all but index values, in the contract's order; gives what is known of the outputs. ONNX has no None: an
  // absent output is empty, of the dtype of its absent input if there is one.
  Infos check(const Infos& given, const Attributes& attributes) const;
};

const char* dtype_name(Type type);
std::string show(const Dims& shape);

// Whether an optional input is there: no for None and shape (0, 0); maybe where that is not known.
enum class Presence { no, yes, maybe };
Presence presence(const TensorInfo& info);

// What is known of an optional input, None where it is absent.
inline TensorInfo where_present(const TensorInfo& info) {
  return presence(info) == Presence::no ? TensorInfo() : info;
}

void require_same_dtype(const char* op, const char* first, const TensorInfo& a, const char* second,
                        const TensorInfo& b, const char* allowed = "");

// Reads shapes by signature and remembers what each axis letter is: one letter, one size in one call, and for "..."
// one shape, whose axes are called 0, 1, ...
class Axes {
 public:
  struct Reading {
    const char* name;
    const TensorInfo& tensor;
    const char* signature;
  };

  explicit Axes(const char* op) : op_(op) {}
  // All ranks first, then all sizes.
  void read(std::initializer_list<Reading> tensors);
  // Says that a letter is `size`; refuses it if it is already another number.
  void bind(char letter, const Dim& size, const std::string& where);
  const Dim& operator[](char letter) const { return size(letter); }
  // The shape of the tensors of any shape, of a dtype, as far as it is known.
  TensorInfo any_shape(Type type) const;
  // The size of a letter divided by `by`, which must leave no rest.
  Dim divide(char letter, const Dim& by, const char* what) const;

 private:
  // Where a size was read. The words are made only for an error.
  struct Size {
    Dim dim;
    std::string where;
    std::string tensor;
    std::string signature;
    Dims shape;
    std::string words() const;
  };
  // Axes of "..." are below 0: -1, -2, ...
  void put(int axis, Size size);
  const Dim& size(int axis) const;

  const char* op_;
  std::map<int, Size> sizes_;
  std::string any_name_;  // the first tensor of any shape
  Dims any_;
};

}  // namespace moe
