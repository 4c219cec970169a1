// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>

#include "dualdecoder/store_options.hpp"
#include "dualdecoder/transfer_scheduler.hpp"

namespace dualdecoder::cpu {

/// Brings one item to its target; runs on the link's thread and on the thread that waits. What it throws, wait() rethrows for the item's
/// lane and layer; the other items still move.
using CopyFunction = std::function<void(const TransferItem&)>;

/// The lanes of the CPU backend: one thread drives the link, and a compute thread that waits for an unthrottled link helps it. Throttled,
/// the link keeps time as LinkQueue describes, exact to a few microseconds. An empty `copy` is memcpy. Destroying the scheduler abandons
/// what has not started. Throws InvalidArgument, OutOfMemory.
std::unique_ptr<TransferScheduler> make_threaded_scheduler(const SchedulerOptions& options, CopyFunction copy = {});

}  // namespace dualdecoder::cpu
