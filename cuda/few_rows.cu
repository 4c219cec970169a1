// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#include "cuda/few_rows.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/bulk_copy.cuh"
#include "cuda/launch.hpp"
#include "cuda/tensor_core.cuh"
#include "cuda/tensor_map.hpp"

namespace dualdecoder::cuda {
namespace {

constexpr int kSlice = 16;  // outputs that a tensor core multiplies at once
constexpr int kColumn = 8;  // rows of x that it does
constexpr int kBox = 64;    // columns of weights and x that are copied at once: 128 bytes a row, whose 16-byte pieces are swizzled
constexpr int kRowBytes = 2 * kBox;
constexpr int kSliceBytes = kSlice * kRowBytes;
constexpr int kWarps = 8;         // that multiply
constexpr int kAlignment = 1024;  // of a swizzled box
constexpr int kMostStages = 24;
constexpr int kLeastStageBytes = 16000;  // shorter ones cost more time for barriers
/// What they leave of a multiprocessor holds a block of a gather and one of the kernels that keep the tables of slots, which run beside:
/// 1024 of its 2048 threads, 43008 of 65536 registers and 50 KB of 228 KB of shared memory.
constexpr int kRingBytes = 160 << 10;
constexpr int kMostThreads = 512;  // of two blocks, by which the compiler counts registers: 64 a thread

enum class Sums { stored, added, gated };

/// Warps that bring rows of x; one more brings weights.
template <int kColumns>
constexpr int kRowWarps = kColumns;
template <int kColumns>
constexpr int kThreads = (kWarps + 1 + kRowWarps<kColumns>)*32;

/// What a launch does. A box holds 64 columns of a tile's weights and of x behind them, a stage of the ring `stage_boxes` of them. Of the
/// warps that multiply, kWarps / parts have a slice each, and those of a slice take boxes in turn.
struct Job {
  CUtensorMap map[kMostWeightMatrices];
  int outputs[kMostWeightMatrices];
  int first[kMostWeightMatrices];  // column of `out` that a matrix begins at
  int tiles[kMostWeightMatrices];  // of the matrices up to this one
  int slices;
  int parts;
  int boxes;
  int stage_boxes;
  int stages;
  int inner;
  int rows;
  int stride;
  const __nv_bfloat16* x;
  void* out;
};

/// Of a box's weights, a box and a stage, for so many columns of eight rows.
template <int kColumns>
struct Bytes {
  int weights;
  int box;
  int stage;
  __host__ __device__ Bytes(int slices, int stage_boxes)
      : weights(slices * kSliceBytes), box(weights + kColumns * kColumn * kRowBytes), stage(stage_boxes * box) {}
};

template <int kColumns>
struct Shared {
  std::uint64_t full[kMostStages];   // weights and rows of a stage are there
  std::uint64_t empty[kMostStages];  // all warps are done with it
  float4 sums[kWarps][kColumns][32];
};

#ifdef DUALDECODER_BULK_COPIES

/// A place in the ring, and the parity of the phase that it waits for: who reads begins with 0, who fills with 1, which stands for the one
/// ahead of a barrier's first and is over.
struct RingPlace {
  int stage;
  unsigned parity;

  __device__ void advance(int stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1U;
  }
};

struct Tile {
  int matrix;
  int first;  // of its outputs
};

template <Sums kSums>
__device__ Tile tile_of(const Job& job, int number) {
  const int outputs = job.slices * (kSums == Sums::gated ? kSlice / 2 : kSlice);
  if (kSums == Sums::gated || number < job.tiles[0]) return {0, number * outputs};
  if (number < job.tiles[1]) return {1, (number - job.tiles[0]) * outputs};
  return {2, (number - job.tiles[1]) * outputs};
}

/// Copies a box of a matrix that is read once: the first to leave L2.
__device__ void copy_box(std::uint32_t target, const CUtensorMap& map, int column, int row, std::uint64_t* barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], "
      "%5;" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

/// Arrives at the barrier when the thread's copies so far have.
__device__ void arrive_with_copies(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Calls use(tile, first box, boxes, place) for each stage that the block fills.
template <Sums kSums, class Use>
__device__ void for_each_stage(const Job& job, Use&& use) {
  RingPlace place{0, 1};
  for (int number = static_cast<int>(blockIdx.x); number < job.tiles[2]; number += static_cast<int>(gridDim.x)) {
    const Tile tile = tile_of<kSums>(job, number);
    for (int box = 0; box < job.boxes; box += job.stage_boxes) {
      use(tile, box, min(job.stage_boxes, job.boxes - box), place);
      place.advance(job.stages);
    }
  }
}

/// One thread brings weights, from the start on, as no kernel of the step writes them.
template <Sums kSums, int kColumns>
__device__ void fill_weights(const Job& job, std::uint32_t ring, Shared<kColumns>& shared) {
  const Bytes<kColumns> bytes(job.slices, job.stage_boxes);
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  for_each_stage<kSums>(job, [&](const Tile& tile, int first, int boxes, const RingPlace& place) {
    std::uint64_t* const full = shared.full + place.stage;
    wait_for_phase(shared.empty + place.stage, place.parity);
    arrive_and_expect(full, static_cast<unsigned>(boxes * bytes.weights));
    auto target = ring + static_cast<std::uint32_t>(place.stage * bytes.stage);
    for (int box = first; box < first + boxes; ++box) {
      copy_box(target, job.map[tile.matrix], box * kBox, tile.first, full, policy);
      if constexpr (kSums == Sums::gated) {
        copy_box(target + static_cast<std::uint32_t>(bytes.weights / 2), job.map[1], box * kBox, tile.first, full, policy);
      }
      target += static_cast<std::uint32_t>(bytes.box);
    }
  });
  let_next_kernel_begin();
}

/// Warps bring the rows, swizzled as the weights are; of a stage's boxes each takes its turn.
template <Sums kSums, int kColumns>
__device__ void fill_rows(const Job& job, std::uint32_t ring, Shared<kColumns>& shared) {
  constexpr int kRowsAtOnce = 4;
  const Bytes<kColumns> bytes(job.slices, job.stage_boxes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int piece = lane % 8;
  const int turn = static_cast<int>(threadIdx.x) / 32 - kWarps - 1;
  wait_for_earlier_kernels();
  for_each_stage<kSums>(job, [&](const Tile&, int first, int boxes, const RingPlace& place) {
    wait_for_phase(shared.empty + place.stage, place.parity);
    for (int box = turn; box < boxes; box += kRowWarps<kColumns>) {
      const auto target = ring + static_cast<std::uint32_t>(place.stage * bytes.stage + box * bytes.box + bytes.weights);
      const int column = (first + box) * kBox + piece * 8;
#pragma unroll
      for (int i = 0; i < kColumns * kColumn / kRowsAtOnce; ++i) {
        const int row = i * kRowsAtOnce + lane / 8;
        const bool present = row < job.rows && column < job.inner;
        const std::size_t at = static_cast<std::size_t>(row) * static_cast<std::size_t>(job.inner) + static_cast<std::size_t>(column);
        copy_async(target + static_cast<std::uint32_t>(row * kRowBytes + (piece ^ (row % 8)) * 16), job.x + (present ? at : 0), present);
      }
    }
    arrive_with_copies(shared.full + place.stage);
  });
  wait_for_copies<0>();
}

/// What a lane holds of the 16 x 8 products of a slice and a column: outputs lane / 4 and eight more, rows 2 * (lane % 4) and one more.
/// With a gate the second output is what the first one gates.
template <Sums kSums>
class Outputs {
 public:
  __device__ Outputs(const Job& job, const Tile& tile, int slice)
      : job_(job),
        lane_(static_cast<int>(threadIdx.x) % 32),
        output_(tile.first + slice * (kSums == Sums::gated ? kSlice / 2 : kSlice) + lane_ / 4),
        outputs_(job.outputs[tile.matrix]),
        first_(job.first[tile.matrix]) {}

  /// What the sums are added to.
  __device__ float4 before(int column) const {
    if constexpr (kSums != Sums::added) return {};
    const int row = row_of(column);
    return {at(row, 0), at(row + 1, 0), at(row, 8), at(row + 1, 8)};
  }
  __device__ void finish(int column, const float4& before, const float4& sums) const {
    const int row = row_of(column);
    if constexpr (kSums == Sums::gated) {
      gate(row, sums.x, sums.z);
      gate(row + 1, sums.y, sums.w);
    } else {
      put(row, 0, before.x + sums.x);
      put(row + 1, 0, before.y + sums.y);
      put(row, 8, before.z + sums.z);
      put(row + 1, 8, before.w + sums.w);
    }
  }

 private:
  __device__ int row_of(int column) const { return column * kColumn + 2 * (lane_ % 4); }
  __device__ bool there(int row, int further) const { return row < job_.rows && output_ + further < outputs_; }
  __device__ std::size_t place(int row, int further) const {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(job_.stride) + static_cast<std::size_t>(first_ + output_ + further);
  }
  __device__ float at(int row, int further) const {
    return there(row, further) ? static_cast<const float*>(job_.out)[place(row, further)] : 0.0F;
  }
  __device__ void put(int row, int further, float value) const {
    if (there(row, further)) static_cast<float*>(job_.out)[place(row, further)] = value;
  }
  __device__ void gate(int row, float gate, float up) const {
    if (there(row, 0)) static_cast<__nv_bfloat16*>(job_.out)[place(row, 0)] = __float2bfloat16_rn(gate / (1.0F + expf(-gate)) * up);
  }

  const Job& job_;
  int lane_;
  int output_;
  int outputs_;
  int first_;
};

/// Adds the products of a box to a warp's sums. `weights` and `x` are where the lane's row of the first fragment lies; 16 columns further
/// on is two pieces, which the swizzle makes an exclusive or.
template <int kColumns>
__device__ void multiply_box(std::uint32_t weights, std::uint32_t x, float (&sums)[kColumns][4]) {
  constexpr int kPairs = (kColumns + 1) / 2;
#pragma unroll
  for (int i = 0; i < kBox / 16; ++i) {
    const auto turn = static_cast<std::uint32_t>(i * 32);
    std::uint32_t a[4];
    load_matrices(a, weights ^ turn);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      std::uint32_t b[4];
      load_matrices(b, (x ^ turn) + static_cast<std::uint32_t>(pair * 2 * kColumn * kRowBytes));
#pragma unroll
      for (int j = 2 * pair; j < min(2 * pair + 2, kColumns); ++j) multiply_add(sums[j], a, b[j % 2 * 2], b[j % 2 * 2 + 1]);
    }
  }
}

__device__ void join_multiplying_warps() { asm volatile("bar.sync 1, %0;" ::"n"(kWarps * 32) : "memory"); }

/// The warps that multiply.
template <Sums kSums, int kColumns>
__device__ void multiply(const Job& job, std::uint32_t ring, Shared<kColumns>& shared) {
  const Bytes<kColumns> bytes(job.slices, job.stage_boxes);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int groups = kWarps / job.parts;
  const int slice = warp % groups;
  const int part = warp / groups;
  const bool used = slice < job.slices;

  const bool second = lane % kSlice >= kSlice / 2;  // half of a slice
  const int weights_row = kSums == Sums::gated ? slice * (kSlice / 2) + lane % 8 : slice * kSlice + lane % kSlice;
  const std::uint32_t weights = ring + static_cast<std::uint32_t>((kSums == Sums::gated && second ? bytes.weights / 2 : 0) +
                                                                  weights_row * kRowBytes + ((lane / 16) ^ (lane % 8)) * 16);
  const int x_row = kColumns == 1 ? lane % 8 : lane % 8 + lane / 16 * 8;
  const std::uint32_t x = ring + static_cast<std::uint32_t>(bytes.weights + x_row * kRowBytes + ((lane / 8 % 2) ^ (lane % 8)) * 16);

  wait_for_earlier_kernels();
  RingPlace place{0, 0};
  for (int number = static_cast<int>(blockIdx.x); number < job.tiles[2]; number += static_cast<int>(gridDim.x)) {
    const Outputs<kSums> outputs(job, tile_of<kSums>(job, number), slice);
    const bool finishes = used && part == 0;
    float4 before[kColumns] = {};
    if (finishes) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) before[j] = outputs.before(j);
    }
    float sums[kColumns][4] = {};
    for (int first = 0; first < job.boxes; first += job.stage_boxes) {
      const int boxes = min(job.stage_boxes, job.boxes - first);
      wait_for_phase(shared.full + place.stage, place.parity);
      if (used) {
#pragma unroll 1
        for (int box = part; box < boxes; box += job.parts) {
          const auto at = static_cast<std::uint32_t>(place.stage * bytes.stage + box * bytes.box);
          multiply_box<kColumns>(weights + at, x + at, sums);
        }
      }
      __syncwarp();
      if (lane == 0) arrive(shared.empty + place.stage);
      place.advance(job.stages);
    }
    if (job.parts > 1) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) shared.sums[warp][j][lane] = {sums[j][0], sums[j][1], sums[j][2], sums[j][3]};
      join_multiplying_warps();
    }
    if (finishes) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        float4 sum{sums[j][0], sums[j][1], sums[j][2], sums[j][3]};
        for (int other = 1; other < job.parts; ++other) {
          const float4 more = shared.sums[slice + other * groups][j][lane];
          sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
        }
        outputs.finish(j, before[j], sum);
      }
    }
    if (job.parts > 1) join_multiplying_warps();  // sums have been read
  }
}

#endif  // DUALDECODER_BULK_COPIES

template <Sums kSums, int kColumns>
__global__ void __launch_bounds__(kMostThreads, 2) few_rows_kernel(const __grid_constant__ Job job) {
#ifdef DUALDECODER_BULK_COPIES
  extern __shared__ uint4 memory[];
  __shared__ Shared<kColumns> shared;
  const std::uint32_t ring = (shared_address(memory) + kAlignment - 1) / kAlignment * kAlignment;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < job.stages; ++stage) {
      start_barrier(shared.full + stage, 1 + kRowWarps<kColumns> * 32);
      start_barrier(shared.empty + stage, kWarps);
    }
    show_barriers();
  }
  __syncthreads();
  if (warp < kWarps) {
    multiply<kSums>(job, ring, shared);
  } else if (warp == kWarps) {
    if (threadIdx.x % 32 == 0) fill_weights<kSums>(job, ring, shared);
  } else {
    fill_rows<kSums>(job, ring, shared);
  }
#endif
}

int outputs_of_slice(bool gated) { return gated ? kSlice / 2 : kSlice; }
int pieces(int count, int size) { return (count + size - 1) / size; }

/// Slices of a tile, so that the block with the most to do has the least: its tiles' weights, and for each of them all of x, which counts
/// as a slice. Among equals the larger tiles.
int slices_for(std::span<const WeightMatrix> matrices, bool gated, int processors) {
  int best = 1;
  int least = 0;
  for (int slices = 1; slices <= kWarps; ++slices) {
    int tiles = 0;
    for (const WeightMatrix& matrix : matrices) tiles += pieces(matrix.outputs, slices * outputs_of_slice(gated));
    const int longest = pieces(tiles, processors) * (slices + 1);
    if (least == 0 || longest <= least) {
      least = longest;
      best = slices;
    }
  }
  return best;
}

template <Sums kSums, int kColumns>
cudaError_t launch(Job job, int processors, cudaStream_t stream) {
  job.parts = kWarps;
  while (kWarps / job.parts < job.slices) job.parts /= 2;
  job.stage_boxes = job.parts;
  while (Bytes<kColumns>(job.slices, job.stage_boxes).stage < kLeastStageBytes) job.stage_boxes *= 2;
  job.stages = std::min(kMostStages, kRingBytes / Bytes<kColumns>(job.slices, job.stage_boxes).stage);
  const auto blocks = static_cast<unsigned>(std::min(processors, job.tiles[2]));
  return launch_overlapped(few_rows_kernel<kSums, kColumns>, blocks, kThreads<kColumns>, kRingBytes + kAlignment, stream, job);
}

template <Sums kSums>
cudaError_t launch_for_rows(const Job& job, int processors, cudaStream_t stream) {
  if (job.rows <= kColumn) return launch<kSums, 1>(job, processors, stream);
  if (job.rows <= 2 * kColumn) return launch<kSums, 2>(job, processors, stream);
  return launch<kSums, 4>(job, processors, stream);
}

template <Sums kSums>
cudaError_t prepare() {
  for (auto* const kernel : {few_rows_kernel<kSums, 1>, few_rows_kernel<kSums, 2>, few_rows_kernel<kSums, 4>}) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRingBytes + kAlignment);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace

bool has_few_rows() noexcept {
  cudaFuncAttributes attributes{};  // of a kernel with the most shared memory
  int device = 0;
  int offered = 0;
  const bool known = cudaFuncGetAttributes(&attributes, few_rows_kernel<Sums::stored, 4>) == cudaSuccess &&
                     cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&offered, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess;
  if (!known) cudaGetLastError();
  const std::size_t taken = attributes.sharedSizeBytes + kRingBytes + kAlignment;
  return known && attributes.ptxVersion >= 90 && taken <= static_cast<std::size_t>(offered) && can_describe();
}

cudaError_t prepare_few_rows() {
  if (const cudaError_t status = prepare<Sums::stored>(); status != cudaSuccess) return status;
  if (const cudaError_t status = prepare<Sums::added>(); status != cudaSuccess) return status;
  return prepare<Sums::gated>();
}

cudaError_t cut_weights(std::span<const WeightMatrix> matrices, int inner, bool gated, WeightTiles& tiles) {
  const bool shape = inner >= 8 && inner % 8 == 0 && !matrices.empty() && matrices.size() <= kMostWeightMatrices;
  if (!shape || (gated && (matrices.size() != 2 || matrices[0].outputs != matrices[1].outputs))) return cudaErrorInvalidValue;
  tiles = {};
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  const cudaError_t status = cudaDeviceGetAttribute(&tiles.processors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  tiles.inner = inner;
  tiles.gated = gated;
  const std::span<const WeightMatrix> own = gated ? matrices.first(1) : matrices;  // those that have tiles of their own
  tiles.slices = slices_for(own, gated, tiles.processors);
  const int box_rows = tiles.slices * outputs_of_slice(gated);
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const WeightMatrix& matrix = matrices[i];
    if (matrix.outputs < 1) return cudaErrorInvalidValue;
    if (const cudaError_t failed = describe(MatrixTensor{matrix.data, matrix.outputs, inner}, box_rows, tiles.map[i]);
        failed != cudaSuccess) {
      return failed;
    }
    tiles.outputs[i] = matrix.outputs;
  }
  return cudaSuccess;
}

cudaError_t launch_few_rows(const WeightTiles& weights, const FewRows& rows, cudaStream_t stream) {
  if (rows.rows < 1 || rows.rows > kMostFewRows || rows.outputs < 1 || (rows.add && weights.gated)) return cudaErrorInvalidValue;
  Job job{};
  int first = 0;
  int tiles = 0;
  for (int i = 0; i < kMostWeightMatrices; ++i) {
    job.map[i] = weights.map[i];
    job.outputs[i] = std::clamp(rows.outputs - first, 0, weights.outputs[i]);
    job.first[i] = first;
    first += weights.outputs[i];
    if (i == 0 || !weights.gated) tiles += pieces(job.outputs[i], weights.slices * outputs_of_slice(weights.gated));
    job.tiles[i] = tiles;
  }
  job.slices = weights.slices;
  job.boxes = pieces(weights.inner, kBox);
  job.inner = weights.inner;
  job.rows = rows.rows;
  job.stride = rows.stride;
  job.x = rows.x;
  job.out = rows.out;
  if (weights.gated) return launch_for_rows<Sums::gated>(job, weights.processors, stream);
  if (rows.add) return launch_for_rows<Sums::added>(job, weights.processors, stream);
  return launch_for_rows<Sums::stored>(job, weights.processors, stream);
}

}  // namespace dualdecoder::cuda
