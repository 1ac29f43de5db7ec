// MoeTokenPermuteWithRoutingMap: the dispatch by a routing map, tokens copied to rows in expert order, see card.md
// beside this file.

#include <algorithm>
#include <cstring>

#include "../native/indices.h"
#include "../native/operator.h"
#include "../native/routing_map.h"

namespace moe {
namespace {

constexpr const char* kName = "MoeTokenPermuteWithRoutingMap";
enum Input { kTokens, kMap, kProbs };
enum Output { kRows, kRowProbs, kIndex };

void mixes(const Infos& inputs) {
  if (presence(inputs[kProbs]) == Presence::no) return;
  check_probs_dtype(kName, "tokens", inputs[kTokens], inputs[kProbs]);
}

Infos shapes(const Infos& inputs, const Attributes& attributes) {
  const Presence there = presence(inputs[kProbs]);
  const bool padded = attributes["drop_and_pad"] != 0;
  const std::int64_t slots = attributes["num_out_tokens"];
  Axes axes(kName);
  axes.read({{"tokens", inputs[kTokens], "T H"},
             {"routing_map", inputs[kMap], "T E"},
             {"probs", where_present(inputs[kProbs]), "T E"}});
  const Dim tokens = axes['T'], experts = axes['E'];
  if (slots > 0 || padded) {
    const Dim cells = tokens.known() && experts.known() ? Dim(tokens.value * experts.value) : Dim();
    axes.bind('N', slots, "attribute 'num_out_tokens'");
    if (padded && slots == 0 && cells.value > 0) {
      AttributeValueError(kName,
                          ": attribute 'num_out_tokens' must be > 0 with drop_and_pad, got 0. Give E * C, with E = ",
                          experts.value, " and C rows for each expert.");
    }
    if (padded) {
      axes.bind('C', axes.divide('N', experts, "the number of experts"), "num_out_tokens / E");
    } else {
      axes.bind('K', axes.divide('N', tokens, "the number of tokens"), "num_out_tokens / T");
    }
    if (cells.known() && slots > cells.value) {
      LimitError(kName, ": attribute 'num_out_tokens' must be at most T * E = ", tokens.value, " * ", experts.value,
                 " = ", cells.value, ", got ", slots, ".");
    }
    check_limits(kName, axes, padded);
  } else if (tokens.is(0) || experts.is(0)) {
    axes.bind('N', 0, "'routing_map'");
  }
  const Type weights = inputs[kProbs].there ? inputs[kProbs].type : inputs[kTokens].type;
  const Dim rows = axes['N'], none = there == Presence::no ? Dim(0) : Dim();
  return {TensorInfo(inputs[kTokens].type, {rows, axes['H']}),
          TensorInfo(weights, {there == Presence::yes ? rows : none}), TensorInfo(Type::int32, {rows})};
}

// Where everything goes: one row for each pair of a token and an expert.
struct Plan {
  std::vector<std::int64_t> cells;  // of each row
  std::vector<std::int32_t> index;  // the output sorted_indices; as long as there are rows to be written
  // The rows of token t are rows[start[t]] to rows[start[t + 1] - 1].
  std::vector<std::int32_t> rows;
  std::vector<std::int64_t> start;
};

// Every expert has C rows: of the tokens that it selected, in order, then of the others, in order.
Plan plan_padded(const std::int8_t* map, std::int64_t tokens, std::int64_t experts, std::int64_t slots) {
  Plan plan;
  plan.cells.resize(std::size_t(slots));
  plan.index.resize(std::size_t(slots));
  const std::int64_t capacity = slots / std::max<std::int64_t>(experts, 1);
  std::vector<std::int64_t> filled(std::size_t(experts), 0);
  std::int64_t left = slots;
  for (const bool selects : {true, false}) {
    for (std::int64_t token = 0; token < tokens && left > 0; ++token) {
      for (std::int64_t expert = 0; expert < experts; ++expert) {
        const std::int64_t cell = token * experts + expert;
        std::int64_t& place = filled[std::size_t(expert)];
        if ((map[cell] != 0) != selects || place == capacity) continue;
        const std::size_t row = std::size_t(expert * capacity + place++);
        plan.cells[row] = cell;
        plan.index[row] = std::int32_t(token);
        --left;
      }
    }
  }
  Groups of_token(plan.index.data(), slots, tokens);
  plan.rows = std::move(of_token.order);
  plan.start = std::move(of_token.start);
  return plan;
}

// Each expert has as many rows as it selects tokens.
Plan plan_unpadded(const std::int8_t* map, std::int64_t tokens, std::int64_t experts, std::int64_t slots) {
  const bool is_asked = slots > 0;
  std::int64_t top_k = slots / std::max<std::int64_t>(tokens, 1);
  std::vector<std::int64_t> next(std::size_t(experts), 0);  // the row of each expert's next token
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::int64_t count = 0;
    for_selected(map + token * experts, experts, [&](std::int64_t expert) {
      ++next[std::size_t(expert)];
      ++count;
    });
    if (is_asked) {
      check_selected(kName, token, count, top_k);
    } else {
      top_k = std::max(top_k, count);
    }
  }
  if (!is_asked) {
    Axes axes(kName);
    axes.bind('K', top_k, "'routing_map'");
    check_limits(kName, axes, false);
  }
  const std::int64_t pairs = to_starts(next);
  Plan plan;
  plan.cells.resize(std::size_t(pairs));
  plan.index.assign(std::size_t(tokens * top_k), -1);
  plan.rows.reserve(std::size_t(pairs));
  plan.start.reserve(std::size_t(tokens) + 1);
  for (std::int64_t token = 0; token < tokens; ++token) {
    std::int64_t slot = token * top_k;
    plan.start.push_back(std::int64_t(plan.rows.size()));
    for_selected(map + token * experts, experts, [&](std::int64_t expert) {
      const std::int64_t row = next[std::size_t(expert)]++;
      plan.cells[std::size_t(row)] = token * experts + expert;
      plan.index[std::size_t(slot++)] = std::int32_t(row);
      plan.rows.push_back(std::int32_t(row));
    });
  }
  plan.start.push_back(pairs);
  return plan;
}

// A token is read once, and copied to all its rows while it is in the cache.
void copy_tokens(Call& call, const Plan& plan, char* out, std::int64_t row_bytes) {
  if (out == nullptr || row_bytes == 0) return;
  const auto* const tokens = call.input<char>(kTokens);
  const std::int64_t num_tokens = call.size(kTokens, 0);
  const std::int64_t pairs = std::int64_t(plan.cells.size()), slots = std::int64_t(plan.index.size());
  const std::int64_t rows_each = pairs / std::max<std::int64_t>(num_tokens, 1);
  const bool past = std::size_t(slots * row_bytes) >= kPastCaches;
  const auto copy = past ? row_table().copy_past : row_table().copy;
  call.parallel(num_tokens, (rows_each + 1) * row_bytes, [=, &plan](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      for (std::int64_t i = plan.start[std::size_t(token)]; i < plan.start[std::size_t(token) + 1]; ++i) {
        copy(out + plan.rows[std::size_t(i)] * row_bytes, tokens + token * row_bytes, std::size_t(row_bytes));
      }
    }
  });
  call.parallel(slots - pairs, row_bytes, [=](std::int64_t begin, std::int64_t end) {
    std::memset(out + (pairs + begin) * row_bytes, 0, std::size_t((end - begin) * row_bytes));
  });
}

template <typename P>
void copy_probs(Call& call, const Plan& plan) {
  const bool is_given = call.is_given(kProbs);
  const std::size_t slots = plan.index.size();
  P* const out = call.output<P>(kRowProbs, {is_given ? std::int64_t(slots) : 0});
  if (out == nullptr || !is_given) return;
  const P* const probs = call.input<P>(kProbs);
  for (std::size_t row = 0; row < slots; ++row) out[row] = row < plan.cells.size() ? probs[plan.cells[row]] : P();
}

void compute(Call& call) {
  const std::int64_t tokens = call.size(kMap, 0), experts = call.size(kMap, 1), hidden = call.size(kTokens, 1);
  const auto* const map = call.input<std::int8_t>(kMap);
  const std::int64_t asked = call.attributes["num_out_tokens"];
  const Plan plan = call.attributes["drop_and_pad"] != 0 ? plan_padded(map, tokens, experts, asked)
                                                         : plan_unpadded(map, tokens, experts, asked);
  const std::int64_t slots = std::int64_t(plan.index.size());
  for_float(call.info(kTokens).type, [&](auto zero) {
    auto* const out = call.output<char>(kRows, {slots, hidden});
    copy_tokens(call, plan, out, hidden * std::int64_t(sizeof zero));
  });
  for_float(call.info(call.is_there(kProbs) ? kProbs : kTokens).type,
            [&](auto zero) { copy_probs<decltype(zero)>(call, plan); });
  auto* const index = call.output<std::int32_t>(kIndex, {slots});
  if (index != nullptr) std::copy(plan.index.begin(), plan.index.end(), index);
}

}  // namespace

extern const Spec moe_token_permute_with_routing_map = {
    kName,
    {
        {"tokens", "T H"},
        {"routing_map", "T E", Kind::maps},
        {"probs", "T E", Kind::floats, true},
    },
    {
        {"permute_tokens", "N H"},
        {"permute_probs", "N", Kind::floats, true, kProbs},
        {"sorted_indices", "N", Kind::indices},
    },
    {{"num_out_tokens", "int", "in [0, 2^31)", 0, kMaxRows}, switch_attribute("drop_and_pad")},
    shapes,
    compute,
    nullptr,
    mixes,
};

}  // namespace moe
