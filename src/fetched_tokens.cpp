// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "src/fetched_tokens.hpp"

#include <algorithm>

namespace dualdecoder::cpu {

void FetchedTokens::carve(Carver& carver) {
  tokens_ = carver.take<int>(lists_ * slots_);
  slot_of_ = carver.take<int>(lists_ * slots_);
  count_ = carver.take<int>(lists_);
  used_ = carver.take<unsigned char>(lists_ * slots_);
}

void FetchedTokens::clear() noexcept {
  std::fill_n(count_, lists_, 0);
  std::fill_n(used_, lists_ * slots_, static_cast<unsigned char>(0));
}

bool FetchedTokens::holds(std::size_t list, int token) const noexcept {
  const std::span<const int> held = tokens(list);
  return std::binary_search(held.begin(), held.end(), token);
}

void FetchedTokens::keep(std::size_t list, std::span<const int> wanted) noexcept {
  int* tokens = tokens_ + list * slots_;
  int* slots = slot_of_ + list * slots_;
  int kept = 0;
  for (int i = 0; i < count_[list]; ++i) {
    if (std::binary_search(wanted.begin(), wanted.end(), tokens[i])) {
      tokens[kept] = tokens[i];
      slots[kept++] = slots[i];
    } else {
      used_[list * slots_ + static_cast<std::size_t>(slots[i])] = 0;
    }
  }
  count_[list] = kept;
}

void FetchedTokens::forget_from(std::size_t list, int first) noexcept {
  int& count = count_[list];
  for (; count > 0 && tokens_[list * slots_ + static_cast<std::size_t>(count - 1)] >= first; --count) {
    used_[list * slots_ + static_cast<std::size_t>(slot_of_[list * slots_ + static_cast<std::size_t>(count - 1)])] = 0;
  }
}

int FetchedTokens::add(std::size_t list, int token) noexcept {
  int* begin = tokens_ + list * slots_;
  int* slots = slot_of_ + list * slots_;
  unsigned char* used = used_ + list * slots_;
  const auto slot = static_cast<int>(std::find(used, used + slots_, static_cast<unsigned char>(0)) - used);
  int* end = begin + count_[list]++;
  int* at = std::lower_bound(begin, end, token);
  std::copy_backward(at, end, end + 1);
  *at = token;
  int* slot_at = slots + (at - begin);
  std::copy_backward(slot_at, slots + (end - begin), slots + (end - begin) + 1);
  *slot_at = slot;
  used[slot] = 1;
  return slot;
}

}  // namespace dualdecoder::cpu
