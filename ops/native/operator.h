// An operator as the runtime sees it, and a call of it as a kernel sees it.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "matmul.h"
#include "number.h"
#include "ort.h"
#include "rows.h"
#include "spec.h"

namespace moe {

// A node of a session: its attributes, and what the kernel made once for all its calls.
struct Node {
  const Spec& spec;
  Attributes attributes;
  // The runtime's MatMul in float32 and float64, by what is transposed: for operators that multiply.
  std::unique_ptr<MatMuls> products;
};

// One run of a node: checked inputs, outputs on demand, and the session's threads.
class Call {
 public:
  Call(const Node& node, OrtKernelContext* context);

  const char* op() const { return node.spec.name; }
  const TensorInfo& info(std::size_t input) const { return infos_[input]; }
  // A size of an input that is there.
  std::int64_t size(std::size_t input, std::size_t axis) const { return infos_[input].shape[axis].value; }
  std::int64_t elements(std::size_t input) const;
  bool is_there(std::size_t input) const { return infos_[input].there; }
  // There, and not of shape (0, 0).
  bool is_given(std::size_t input) const { return infos_[input].there && !infos_[input].empty_pair(); }
  template <typename T>
  const T* input(std::size_t index) const {
    return static_cast<const T*>(data_[index]);
  }
  // Allocates an output; null where the node does not ask for it or where it is empty.
  template <typename T>
  T* output(std::size_t index, const std::vector<std::int64_t>& shape) {
    return static_cast<T*>(allocate(index, shape));
  }
  // The sizes of an output as the checks found them.
  std::vector<std::int64_t> output_shape(std::size_t index) const;

  // task(begin, end) for parts of [0, rows), on the session's threads where it is worth it. Each row is made by
  // one thread, so results do not depend on their number. Tasks must not throw.
  template <typename Task>
  void parallel(std::int64_t rows, std::int64_t bytes_per_row, const Task& task) const {
    const auto run = [](void* user, std::size_t part) {
      const Parts& parts = *static_cast<const Parts*>(user);
      const std::int64_t begin = std::int64_t(part) * parts.rows_each;
      (*static_cast<const Task*>(parts.task))(begin, std::min(parts.rows, begin + parts.rows_each));
    };
    run_parts(rows, bytes_per_row, run, &task);
  }

  OrtKernelContext* context() const { return context_; }

  const Node& node;
  const Attributes& attributes;

 private:
  struct Parts {
    const void* task;
    std::int64_t rows;
    std::int64_t rows_each;
  };
  void run_parts(std::int64_t rows, std::int64_t bytes_per_row, void (*run)(void*, std::size_t),
                 const void* task) const;
  void* allocate(std::size_t index, const std::vector<std::int64_t>& shape);

  OrtKernelContext* context_;
  Infos infos_;
  Infos outputs_;
  std::vector<void*> data_;
};

// Zeros the rows of `bytes` bytes for which is_named(row) is false: an output has no row that nobody wrote.
template <typename IsNamed>
void zero_unnamed(const Call& call, void* out, std::int64_t rows, std::int64_t bytes, const IsNamed& is_named) {
  char* const first = static_cast<char*>(out);
  // Most rows are only asked for.
  call.parallel(rows, 1 + bytes / 64, [=, &is_named](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      if (!is_named(row)) std::memset(first + row * bytes, 0, std::size_t(bytes));
    }
  });
}

// action(T()) for the element type T of a float tensor.
template <typename Action>
void for_float(Type type, const Action& action) {
  switch (type) {
    case Type::float16: return action(float16());
    case Type::bfloat16: return action(bfloat16());
    case Type::float64: return action(double());
    default: return action(float());
  }
}

// The same for rows and their probabilities or scales: of one type, or float32 beside bfloat16.
template <typename Action>
void for_floats(Type rows, Type scales, const Action& action) {
  if (rows == Type::bfloat16 && scales == Type::float32) return action(bfloat16(), float());
  for_float(rows, [&](auto zero) { action(zero, zero); });
}

// Makes an operator known to the runtime; lives as long as the process.
OrtCustomOp* custom_op(const Spec& spec);

}  // namespace moe
