// A runtime made up for tests: the slots of ops/native/ort_abi.h, on vectors and threads.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../ops/native/ort_abi.h"

using std::int32_t;
using std::int64_t;
using std::size_t;

namespace moe {

struct OrtStatus {
  std::string text;
};
struct OrtTensorTypeAndShapeInfo {
  Type type = Type::undefined;
  std::vector<int64_t> dims;
  std::vector<std::string> names;  // of sizes that are -1
};
struct OrtValue {
  OrtTensorTypeAndShapeInfo info;
  char* data = nullptr;
  size_t bytes = 0;
  bool owned = false;
  ~OrtValue() {
    if (owned) std::free(data);
  }
};
struct OrtOpAttr {
  bool is_list = false;
  std::vector<int64_t> values;
  std::string name;
};
struct OrtKernelInfo {
  std::map<std::string, OrtOpAttr> attributes;
};
struct OrtShapeInferContext {
  const OrtKernelInfo* node;
  std::vector<OrtTensorTypeAndShapeInfo> inputs, outputs;
};
struct OrtKernelContext {
  std::vector<OrtValue*> inputs;
  std::vector<std::unique_ptr<OrtValue>> outputs;
  std::vector<char> wanted;  // of each output, as far as the last one that is
  std::vector<Type> types;
  size_t threads = 1;
  int fill = 0;  // what stands in outputs before they are written
};
struct OrtOp {
  Type type;
  bool transpose[2] = {};
};
struct OrtMemoryInfo {};
struct OrtSessionOptions {};
struct OrtCustomOpDomain {
  std::vector<const OrtCustomOp*> ops;
};

namespace fake {

inline OrtCustomOpDomain* registered = nullptr;
inline bool empty_is_null = false;

inline size_t size_of(Type type) {
  switch (type) {
    case Type::undefined: return 0;
    case Type::uint8: case Type::int8: case Type::boolean: return 1;
    case Type::uint16: case Type::int16: case Type::float16: case Type::bfloat16: return 2;
    case Type::float32: case Type::int32: case Type::uint32: return 4;
    case Type::complex128: return 16;
    default: return 8;
  }
}

// Exactly as many bytes as the tensor has: what is beyond belongs to nobody.
inline void allocate(OrtValue& value) {
  value.bytes = size_of(value.info.type);
  for (int64_t dim : value.info.dims) value.bytes *= size_t(dim);
  value.owned = true;
  value.data = value.bytes || !empty_is_null ? static_cast<char*>(std::malloc(value.bytes)) : nullptr;
}

inline OrtStatus* CreateStatus(ErrorCode, const char* message) { return new OrtStatus{message}; }
inline OrtStatus* fail(const std::string& text) { return new OrtStatus{"runtime: " + text}; }
inline const char* GetErrorMessage(const OrtStatus* status) { return status->text.c_str(); }
inline void ReleaseStatus(OrtStatus* status) { delete status; }
inline OrtStatus* CreateCustomOpDomain(const char*, OrtCustomOpDomain** out) {
  *out = new OrtCustomOpDomain;
  return nullptr;
}
inline OrtStatus* CustomOpDomain_Add(OrtCustomOpDomain* domain, const OrtCustomOp* op) {
  domain->ops.push_back(op);
  return nullptr;
}
inline OrtStatus* AddCustomOpDomain(OrtSessionOptions*, OrtCustomOpDomain* domain) {
  registered = domain;
  return nullptr;
}
inline void ReleaseCustomOpDomain(OrtCustomOpDomain* domain) { delete domain; }

inline OrtStatus* find(const OrtKernelInfo* node, const char* name, bool is_list, const OrtOpAttr** out) {
  const auto place = node->attributes.find(name);
  if (place == node->attributes.end()) return fail(std::string("No attribute with name:'") + name + "' is defined.");
  if (place->second.is_list != is_list) return fail("Attribute expected to have another type");
  *out = &place->second;
  return nullptr;
}
inline OrtStatus* KernelInfoGetAttribute_int64(const OrtKernelInfo* info, const char* name, int64_t* out) {
  const OrtOpAttr* attribute = nullptr;
  if (OrtStatus* status = find(info, name, false, &attribute)) return status;
  *out = attribute->values.at(0);
  return nullptr;
}
inline OrtStatus* KernelInfoGetAttributeArray_int64(const OrtKernelInfo* info, const char* name, int64_t* out, size_t* size) {
  const OrtOpAttr* attribute = nullptr;
  if (OrtStatus* status = find(info, name, true, &attribute)) return status;
  if (out != nullptr && *size < attribute->values.size()) return fail("Result buffer is not large enough");
  *size = attribute->values.size();
  if (out != nullptr) std::copy(attribute->values.begin(), attribute->values.end(), out);
  return nullptr;
}

inline OrtStatus* KernelContext_GetInputCount(const OrtKernelContext* context, size_t* out) {
  *out = context->inputs.size();
  return nullptr;
}
inline OrtStatus* KernelContext_GetOutputCount(const OrtKernelContext* context, size_t* out) {
  *out = context->wanted.size();
  return nullptr;
}
inline OrtStatus* KernelContext_GetInput(const OrtKernelContext* context, size_t index, const OrtValue** out) {
  if (index >= context->inputs.size()) return fail("no such input");
  *out = context->inputs[index];
  return nullptr;
}
inline OrtStatus* KernelContext_GetOutput(OrtKernelContext* context, size_t index, const int64_t* dims, size_t rank,
                                   OrtValue** out) {
  *out = nullptr;
  if (index >= context->wanted.size()) return fail("no such output");
  if (!context->wanted[index]) return nullptr;
  auto& output = context->outputs[index];
  if (output) return fail("an output is asked for twice");
  output = std::make_unique<OrtValue>();
  output->info = {context->types[index], std::vector<int64_t>(dims, dims + rank), {}};
  for (int64_t dim : output->info.dims) {
    if (dim < 0) return fail("an output has a negative size");
  }
  if (output->info.type == Type::undefined) return fail("the type of an output is not known");
  allocate(*output);
  if (output->bytes) std::memset(output->data, context->fill, output->bytes);
  *out = output.get();
  return nullptr;
}
inline OrtStatus* KernelContext_ParallelFor(const OrtKernelContext* context, void (*task)(void*, size_t), size_t total, size_t,
                                     void* user) {
  const size_t count = context->threads;
  if (count == 1) {
    for (size_t part = total; part-- > 0;) task(user, part);  // the order of parts is nobody's business
    return nullptr;
  }
  // Turn about, so that every thread has parts of its own however short they are.
  const auto work = [=](size_t first) {
    for (size_t part = first; part < total; part += count) task(user, part);
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < count && i < total; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& other : others) other.join();
  return nullptr;
}

inline OrtStatus* GetTensorTypeAndShape(const OrtValue* value, OrtTensorTypeAndShapeInfo** out) {
  *out = new OrtTensorTypeAndShapeInfo(value->info);
  return nullptr;
}
inline void ReleaseTensorTypeAndShapeInfo(OrtTensorTypeAndShapeInfo* info) { delete info; }
inline OrtStatus* GetTensorElementType(const OrtTensorTypeAndShapeInfo* info, Type* out) {
  *out = info->type;
  return nullptr;
}
inline OrtStatus* GetDimensionsCount(const OrtTensorTypeAndShapeInfo* info, size_t* out) {
  *out = info->dims.size();
  return nullptr;
}
inline OrtStatus* GetDimensions(const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t rank) {
  std::copy_n(info->dims.begin(), rank, dims);
  return nullptr;
}
inline OrtStatus* GetSymbolicDimensions(const OrtTensorTypeAndShapeInfo* info, const char** names, size_t rank) {
  for (size_t i = 0; i < rank; ++i) names[i] = i < info->names.size() ? info->names[i].c_str() : "";
  return nullptr;
}
inline OrtStatus* GetTensorMutableData(OrtValue* value, void** out) {
  *out = value->data;
  return nullptr;
}
inline OrtStatus* CreateTensorTypeAndShapeInfo(OrtTensorTypeAndShapeInfo** out) {
  *out = new OrtTensorTypeAndShapeInfo;
  return nullptr;
}
inline OrtStatus* SetTensorElementType(OrtTensorTypeAndShapeInfo* info, Type type) {
  info->type = type;
  return nullptr;
}
inline OrtStatus* SetDimensions(OrtTensorTypeAndShapeInfo* info, const int64_t* dims, size_t rank) {
  info->dims.assign(dims, dims + rank);
  return nullptr;
}
inline OrtStatus* SetSymbolicDimensions(OrtTensorTypeAndShapeInfo* info, const char** names, size_t rank) {
  info->names.assign(names, names + rank);
  return nullptr;
}
inline OrtStatus* ShapeInferContext_GetInputCount(const OrtShapeInferContext* context, size_t* out) {
  *out = context->inputs.size();
  return nullptr;
}
inline OrtStatus* ShapeInferContext_GetInputTypeShape(const OrtShapeInferContext* context, size_t index,
                                               OrtTensorTypeAndShapeInfo** out) {
  // It stays the runtime's own.
  *out = const_cast<OrtTensorTypeAndShapeInfo*>(&context->inputs.at(index));
  return nullptr;
}
inline OrtStatus* ShapeInferContext_GetAttribute(const OrtShapeInferContext* context, const char* name, const OrtOpAttr** out) {
  const auto place = context->node->attributes.find(name);
  if (place == context->node->attributes.end()) return fail("Attribute not found");
  *out = &place->second;
  return nullptr;
}
inline OrtStatus* ShapeInferContext_SetOutputTypeShape(const OrtShapeInferContext* context, size_t index,
                                                const OrtTensorTypeAndShapeInfo* info) {
  const_cast<OrtShapeInferContext*>(context)->outputs.at(index) = *info;
  return nullptr;
}
inline OrtStatus* ReadOpAttr(const OrtOpAttr* attribute, AttrType type, void* data, size_t size, size_t* out) {
  if (attribute->is_list != (type == AttrType::integers)) return fail("Attribute expected to have another type");
  *out = attribute->values.size() * sizeof(int64_t);
  if (size < *out) return fail("Size of data not large enough to hold the attribute");
  if (*out) std::memcpy(data, attribute->values.data(), *out);
  return nullptr;
}

inline OrtStatus* CreateOpAttr(const char* name, const void* data, int size, AttrType type, OrtOpAttr** out) {
  int64_t value = 0;
  float real = 0;
  if (size != 1 || (type != AttrType::integer && type != AttrType::real)) return fail("only single numbers");
  if (type == AttrType::integer) {
    std::memcpy(&value, data, sizeof value);
  } else {
    std::memcpy(&real, data, sizeof real);
    value = int64_t(real);
  }
  *out = new OrtOpAttr{false, {value}, name};
  return nullptr;
}
inline void ReleaseOpAttr(OrtOpAttr* attribute) { delete attribute; }
inline OrtStatus* CreateOp(const OrtKernelInfo*, const char* name, const char*, int, const char**, const Type* types, int,
                    const OrtOpAttr* const* attributes, int count, int, int, OrtOp** out) {
  if (std::strcmp(name, "Gemm") != 0) return fail("no such operator");
  auto op = std::make_unique<OrtOp>();
  op->type = types[0];
  for (int i = 0; i < count; ++i) {
    const std::string& attribute = attributes[i]->name;
    const int64_t value = attributes[i]->values[0];
    if (attribute == "transA") op->transpose[0] = value != 0;
    if (attribute == "transB") op->transpose[1] = value != 0;
    if (attribute == "alpha" && value != 1) return fail("alpha must be 1");
  }
  *out = op.release();
  return nullptr;
}
template <typename T>
void multiply(const OrtOp& op, const OrtValue& a, const OrtValue& b, OrtValue& c) {
  const auto at = [](const OrtValue& value, int64_t row, int64_t column) {
    return double(reinterpret_cast<const T*>(value.data)[row * value.info.dims[1] + column]);
  };
  const int64_t inner = a.info.dims[op.transpose[0] ? 0 : 1];
  for (int64_t i = 0; i < c.info.dims[0]; ++i) {
    for (int64_t j = 0; j < c.info.dims[1]; ++j) {
      double total = 0;
      for (int64_t k = 0; k < inner; ++k) {
        total += (op.transpose[0] ? at(a, k, i) : at(a, i, k)) * (op.transpose[1] ? at(b, j, k) : at(b, k, j));
      }
      reinterpret_cast<T*>(c.data)[i * c.info.dims[1] + j] = T(total);
    }
  }
}
inline OrtStatus* InvokeOp(const OrtKernelContext*, const OrtOp* op, const OrtValue* const* inputs, int count,
                    OrtValue* const* outputs, int) {
  const OrtValue &a = *inputs[0], &b = *inputs[1];
  OrtValue& c = *outputs[0];
  if (count != 2 || a.info.dims.size() != 2 || b.info.dims.size() != 2 || c.info.dims.size() != 2) {
    return fail("only matrices");
  }
  const bool left = op->transpose[0], right = op->transpose[1];
  if (a.info.dims[left] != c.info.dims[0] || b.info.dims[!right] != c.info.dims[1] ||
      a.info.dims[!left] != b.info.dims[right] || a.info.type != op->type || b.info.type != op->type) {
    return fail("matrices that do not fit");
  }
  op->type == Type::float64 ? multiply<double>(*op, a, b, c) : multiply<float>(*op, a, b, c);
  return nullptr;
}
inline void ReleaseOp(OrtOp* op) { delete op; }
inline OrtStatus* CreateCpuMemoryInfo(int32_t, int32_t, OrtMemoryInfo** out) {
  *out = new OrtMemoryInfo;
  return nullptr;
}
inline void ReleaseMemoryInfo(OrtMemoryInfo* info) { delete info; }
inline OrtStatus* CreateTensorWithDataAsOrtValue(const OrtMemoryInfo*, void* data, size_t bytes, const int64_t* dims,
                                          size_t rank, Type type, OrtValue** out) {
  auto value = std::make_unique<OrtValue>();
  value->info = {type, std::vector<int64_t>(dims, dims + rank), {}};
  size_t needed = size_of(type);
  for (size_t i = 0; i < rank; ++i) needed *= size_t(dims[i]);
  if (needed > bytes) return fail("a tensor larger than its data");
  value->data = static_cast<char*>(data);
  value->bytes = bytes;
  *out = value.release();
  return nullptr;
}
inline void ReleaseValue(OrtValue* value) { delete value; }

inline const void* slots[512];  // those that the library does not declare stay null
inline const OrtApi* GetApi(std::uint32_t) {
#define MOE_FILL(name, slot, result, arguments) \
  {                                             \
    result(*function) arguments = name;         \
    slots[slot] = reinterpret_cast<const void*>(function); \
  }
  MOE_ORT_FUNCTIONS(MOE_FILL)
#undef MOE_FILL
  return reinterpret_cast<const OrtApi*>(slots);
}
inline const OrtApiBase base = {GetApi, [] { return "1.99.0"; }};

}  // namespace fake
}  // namespace moe
