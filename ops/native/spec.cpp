#include "spec.h"

#include <cstring>

namespace moe {

namespace {

const char* axis_meaning(char letter) {
  switch (letter) {
    case 'T': return "tokens";
    case 'H': return "hidden size";
    case 'E': return "experts";
    case 'K': return "experts per token (top_k)";
    case 'C': return "expert capacity, rows per expert";
    case 'A': return "active rows (active_num)";
    case 'N': return "routed rows: T*K, or E*C when padded";
    case 'R': return "rows of expanded_x: T*K, or min(active_num, T*K)";
    case 'F': return "expert hidden size";
    case 'G': return "gate and up of an expert, side by side: 2 F";
    case 'P': return "rows of permuted_tokens: N, or only as many as the routing map selects";
    case 'S': return "factors of an update";
    default: return "?";
  }
}

bool legal_dtype(Kind kind, Type type) {
  switch (kind) {
    case Kind::floats:
      return type == Type::float16 || type == Type::bfloat16 || type == Type::float32 || type == Type::float64;
    case Kind::masters: return type == Type::float32 || type == Type::float64;
    case Kind::indices: return type == Type::int32;
    case Kind::maps: return type == Type::boolean || type == Type::int8;
  }
  return false;
}

const char* legal_dtypes(Kind kind) {
  switch (kind) {
    case Kind::floats: return "float16, bfloat16, float32, float64";
    case Kind::masters: return "float32, float64";
    case Kind::indices: return "int32";
    case Kind::maps: return "bool, int8";
  }
  return "";
}

const Dim kUnknown;

// "axis H (hidden size)", "axis 1 (of any shape)"
std::string axis_words(int axis) {
  if (axis < 0) return words("axis ", -1 - axis, " (of any shape)");
  return words("axis ", std::string(1, char(axis)), " (", axis_meaning(char(axis)), ")");
}

}  // namespace

const char* dtype_name(Type type) {
  switch (type) {
    case Type::undefined: return "undefined";
    case Type::float32: return "float32";
    case Type::uint8: return "uint8";
    case Type::int8: return "int8";
    case Type::uint16: return "uint16";
    case Type::int16: return "int16";
    case Type::int32: return "int32";
    case Type::int64: return "int64";
    case Type::string: return "string";
    case Type::boolean: return "bool";
    case Type::float16: return "float16";
    case Type::float64: return "float64";
    case Type::uint32: return "uint32";
    case Type::uint64: return "uint64";
    case Type::complex64: return "complex64";
    case Type::complex128: return "complex128";
    case Type::bfloat16: return "bfloat16";
  }
  return "a dtype unknown to this library";
}

bool is_any(const char* signature) { return std::strcmp(signature, kAny) == 0; }

std::string show(const Dims& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const Dim& dim = shape[i];
    text += i ? ", " : "";
    text += dim.known() ? std::to_string(dim.value) : dim.name.empty() ? "?" : dim.name;
  }
  return text + "]";
}

Presence presence(const TensorInfo& info) {
  if (!info.there || info.empty_pair()) return Presence::no;
  if (!info.ranked) return Presence::maybe;
  if (info.shape.size() != 2) return Presence::yes;
  // [0, ?] may turn out to be [0, 0]; any size that is known not to be 0 settles it.
  for (const Dim& dim : info.shape) {
    if (dim.known() && !dim.is(0)) return Presence::yes;
  }
  return Presence::maybe;
}

void require_same_dtype(const char* op, const char* first, const TensorInfo& a, const char* second,
                        const TensorInfo& b, const char* allowed) {
  if (a.type != Type::undefined && b.type != Type::undefined && a.type != b.type) {
    throw Error("DtypeError", kOther,
                words(op, ": '", second, "' must have the dtype of '", first, "' (", dtype_name(a.type), ")", allowed,
                      ", got ", dtype_name(b.type), ". Convert one of them."));
  }
}

Infos Spec::check(const Infos& given, const Attributes& values) const {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!given[i].there && !inputs[i].optional) {
      MissingInputError(name, ": required input '", inputs[i].name, "' is missing. Pass a tensor of shape [",
                        inputs[i].axes, "].");
    }
  }
  if (missing != nullptr) missing(given, values);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const TensorInfo& info = given[i];
    const bool absent = !info.there || (inputs[i].optional && info.empty_pair());
    if (!absent && info.type != Type::undefined && !legal_dtype(inputs[i].kind, info.type)) {
      DtypeError(name, ": '", inputs[i].name, "' must be one of ", legal_dtypes(inputs[i].kind), ", got ",
                 dtype_name(info.type), ". Convert it before the call.");
    }
  }
  if (mixes != nullptr) mixes(given);
  Infos made = shapes(given, values);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (made[i].there) continue;
    const TensorInfo& source = given[outputs[i].like].there ? given[outputs[i].like] : given[0];
    const Type type = outputs[i].kind == Kind::indices ? Type::int32 : source.type;
    made[i] = TensorInfo(type, Dims((std::strlen(outputs[i].axes) + 1) / 2, Dim(0)));
  }
  return made;
}

std::string Axes::Size::words() const {
  return tensor.empty() ? where : "'" + tensor + "', whose shape " + show(shape) + " is read as [" + signature + "]";
}

void Axes::read(std::initializer_list<Reading> tensors) {
  for (const Reading& one : tensors) {
    if (!one.tensor.there || !one.tensor.ranked) continue;
    if (is_any(one.signature)) {
      if (any_name_.empty()) {
        any_name_ = one.name;
        any_ = one.tensor.shape;
      }
      if (one.tensor.shape.size() != any_.size()) {
        RankError(op_, ": '", one.name, "' must have the rank of '", any_name_, "', ", any_.size(), "-D, shape ",
                  show(any_), ", got ", one.tensor.shape.size(), "-D, shape ", show(one.tensor.shape), ".");
      }
      continue;
    }
    const std::size_t rank = (std::strlen(one.signature) + 1) / 2;  // letters with a space between
    if (one.tensor.shape.size() != rank) {
      RankError(op_, ": '", one.name, "' must be ", rank, "-D, [", one.signature, "], got ",
                one.tensor.shape.size(), "-D, shape ", show(one.tensor.shape), ".");
    }
  }
  for (const Reading& one : tensors) {
    if (!one.tensor.there || !one.tensor.ranked) continue;
    for (std::size_t i = 0; i < one.tensor.shape.size(); ++i) {
      const int axis = is_any(one.signature) ? -1 - int(i) : one.signature[2 * i];
      put(axis, {one.tensor.shape[i], "", one.name, one.signature, one.tensor.shape});
    }
  }
}

void Axes::bind(char letter, const Dim& size, const std::string& where) { put(letter, {size, where, "", "", {}}); }

void Axes::put(int axis, Size size) {
  auto [place, is_new] = sizes_.try_emplace(axis, size);
  if (is_new) return;
  Size& before = place->second;
  if (before.dim.known() && size.dim.known() && before.dim.value != size.dim.value) {
    ShapeError(op_, ": ", axis_words(axis), " is ", before.dim.value, " in ", before.words(), " but ", size.dim.value,
               " in ", size.words(), ". They must be equal.");
  }
  const bool nothing = !before.dim.known() && before.dim.name.empty();
  if (nothing || (!before.dim.known() && size.dim.known())) before = std::move(size);
}

const Dim& Axes::size(int axis) const {
  const auto place = sizes_.find(axis);
  return place == sizes_.end() ? kUnknown : place->second.dim;
}

TensorInfo Axes::any_shape(Type type) const {
  if (any_name_.empty()) return TensorInfo(type);
  Dims shape;
  for (std::size_t i = 0; i < any_.size(); ++i) shape.push_back(size(-1 - int(i)));
  return TensorInfo(type, std::move(shape));
}

Dim Axes::divide(char letter, const Dim& by, const char* what) const {
  const Dim& size = (*this)[letter];
  if (by.is(1)) return size;
  if (!size.known() || !by.known()) return {};
  if (by.is(0) && size.is(0)) return 0;
  if (by.is(0) || size.value % by.value != 0) {
    ShapeError(op_, ": ", sizes_.at(letter).words(), ": ", axis_words(letter), " must be divisible by ", what, ", got ", size.value, " and ", by.value, ".");
  }
  return size.value / by.value;
}

}  // namespace moe
