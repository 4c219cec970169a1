// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/tensor_core.cuh"

/// Products of a warpgroup (four warps) on Hopper's tensor cores, whose operands lie in shared memory in the 128-byte swizzle; PTX ISA
/// section "Asynchronous warpgroup level matrix multiply-accumulate". They exist on sm_90a alone; elsewhere these functions do nothing.
namespace dualdecoder::cuda {

/// Whether code for this architecture has them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kHasWarpgroups = true;
#else
inline constexpr bool kHasWarpgroups = false;
#endif

/// A swizzled tile: rows of 64 bf16 in 128 bytes, at 1024 bytes, in which piece c (16 bytes) of row r lies at place c ^ (r % 8).
inline constexpr std::uint32_t kTileRowBytes = 128;

/// Names rows from `address` on whose inner index is the tile's contiguous one. 16 elements further on are 32 bytes.
__device__ inline std::uint64_t inner_contiguous(std::uint32_t address) {
  return std::uint64_t{1} << 62U | std::uint64_t{8 * kTileRowBytes >> 4U} << 32U | std::uint64_t{1} << 16U | (address & 0x3FFFFU) >> 4U;
}
/// Names rows from `address` on that are the inner index; outputs beyond 64 lie in further tiles, `tile_bytes` apart. 16 rows further on
/// are 2048 bytes.
__device__ inline std::uint64_t outputs_contiguous(std::uint32_t address, std::uint32_t tile_bytes) {
  return std::uint64_t{1} << 62U | std::uint64_t{8 * kTileRowBytes >> 4U} << 32U | std::uint64_t{tile_bytes >> 4U} << 16U |
         (address & 0x3FFFFU) >> 4U;
}
/// What an operand's name grows by for so many bytes.
constexpr std::uint64_t further(std::uint32_t bytes) { return bytes >> 4U; }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DUALDECODER_EIGHT(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DUALDECODER_THIRTY_TWO(d, i) \
  DUALDECODER_EIGHT(d, i), DUALDECODER_EIGHT(d, i + 8), DUALDECODER_EIGHT(d, i + 16), DUALDECODER_EIGHT(d, i + 24)
#define DUALDECODER_SIXTY_FOUR(d, i) DUALDECODER_THIRTY_TWO(d, i), DUALDECODER_THIRTY_TWO(d, i + 32)
#define DUALDECODER_NAMES_32                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DUALDECODER_NAMES_40 \
  DUALDECODER_NAMES_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define DUALDECODER_NAMES_48 \
  DUALDECODER_NAMES_40       \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define DUALDECODER_NAMES_64 \
  DUALDECODER_NAMES_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DUALDECODER_NAMES_128                                                                    \
  DUALDECODER_NAMES_64                                                                           \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#endif

/// sum = (add ? sum : 0) + a * b^T for a: 64x16 and b: 128x16, both inner_contiguous. A thread's sums lie as mma.sync leaves them: element
/// 4 j + e belongs to columns 8 j ..., warp w of the group has rows 16 w ... Runs on while the threads do; see wait_for_products.
__device__ inline void start_product(float (&sum)[64], std::uint64_t a, std::uint64_t b, bool add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" DUALDECODER_NAMES_64 "}, %64, %65, add, 1, 1, 0, 0;\n}"
      : DUALDECODER_SIXTY_FOUR(sum, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#endif
}
/// The same for b: 64x16.
__device__ inline void start_product(float (&sum)[32], std::uint64_t a, std::uint64_t b, bool add) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" DUALDECODER_NAMES_32 "}, %32, %33, add, 1, 1, 0, 0;\n}"
      : DUALDECODER_THIRTY_TWO(sum, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#endif
}

/// sum += a * b for a: 64x16 in registers as mma.sync has it and b: 16 rows of columns, outputs_contiguous.
template <int kColumns>
__device__ inline void start_product(float (&sum)[kColumns / 2], const std::uint32_t (&a)[4], std::uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define DUALDECODER_START(columns, names, rest, ...)                                                                 \
  if constexpr (kColumns == columns) {                                                                               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" names "}, " rest ", 1, 1, 1, 1;" \
                 : __VA_ARGS__                                                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
  }
  DUALDECODER_START(64, DUALDECODER_NAMES_32, "{%32, %33, %34, %35}, %36", DUALDECODER_THIRTY_TWO(sum, 0))
  DUALDECODER_START(80, DUALDECODER_NAMES_40, "{%40, %41, %42, %43}, %44", DUALDECODER_THIRTY_TWO(sum, 0), DUALDECODER_EIGHT(sum, 32))
  DUALDECODER_START(96, DUALDECODER_NAMES_48, "{%48, %49, %50, %51}, %52", DUALDECODER_THIRTY_TWO(sum, 0), DUALDECODER_EIGHT(sum, 32),
                    DUALDECODER_EIGHT(sum, 40))
  DUALDECODER_START(128, DUALDECODER_NAMES_64, "{%64, %65, %66, %67}, %68", DUALDECODER_SIXTY_FOUR(sum, 0))
  DUALDECODER_START(256, DUALDECODER_NAMES_128, "{%128, %129, %130, %131}, %132", DUALDECODER_SIXTY_FOUR(sum, 0),
                    DUALDECODER_SIXTY_FOUR(sum, 64))
#undef DUALDECODER_START
#endif
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#undef DUALDECODER_EIGHT
#undef DUALDECODER_THIRTY_TWO
#undef DUALDECODER_SIXTY_FOUR
#undef DUALDECODER_NAMES_32
#undef DUALDECODER_NAMES_40
#undef DUALDECODER_NAMES_48
#undef DUALDECODER_NAMES_64
#undef DUALDECODER_NAMES_128
#endif

/// Orders what was written to registers before the products that start next.
__device__ inline void before_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/// Closes a group of started products.
__device__ inline void commit_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// Waits until all but the newest kNewest groups are done; the warps of a warpgroup come here together, as to all of these.
template <int kNewest>
__device__ inline void wait_for_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
#endif
}
/// Keeps the compiler from moving uses of the sums over the waits around this.
template <int kCount>
__device__ inline void pin(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
/// Whether `mine` holds in any of this warpgroup's threads, at the hardware's barrier `id` (1 to 15; __syncthreads has 0).
__device__ inline bool any_of_warpgroup(bool mine, int id) {
  unsigned any = 0;
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.or.aligned.pred any, %2, 128, mine;\nselp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<unsigned>(mine)), "r"(id)
      : "memory");
  return any != 0;
}

/// Copies the tile at (column, head, row) of a tensor that `map` describes (cuda/tensor_map.hpp); its bytes count on `barrier`.
__device__ inline void copy_tile(std::uint32_t target, const CUtensorMap& map, int column, int head, int row, std::uint64_t* barrier) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(target),
               "l"(&map), "r"(column), "r"(head), "r"(row), "r"(shared_address(barrier))
               : "memory");
#endif
}

/// From here on this warpgroup's threads have so many registers; of a kernel whose launch bounds name its blocks per processor.
template <int kRegisters>
__device__ inline void give_registers_up() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ inline void take_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace dualdecoder::cuda
