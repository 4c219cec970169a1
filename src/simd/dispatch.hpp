// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#pragma once

/// How vector kernels are chosen at run time. A file `x.simd.inl` is compiled once for each instruction set, in a namespace of its own
/// (DUALDECODER_SIMD_NAMESPACE), and defines one constant table of function pointers there:
///
///     x_simd.hpp   struct XKernels { void (*f)(...); };  const XKernels& x_kernels(Isa isa) noexcept;   // no inline functions
///     x.simd.inl   namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE { extern const XKernels x_kernels; const XKernels x_kernels{f};
///     } x_simd.cpp   namespace dualdecoder::cpu { DUALDECODER_SIMD_CHOICE(XKernels, x_kernels) }
///
/// Whoever runs kernels keeps the table of detected_isa(), unless it was made for another Isa (tests run every one that the machine has).
namespace dualdecoder::cpu {

/// Instruction sets that kernels are compiled for, in rising order; a machine that has one has those before it.
enum class Isa : unsigned char {
  baseline,  ///< what the compiler assumes anyway; the only one elsewhere than on x86-64
  avx2,      ///< with FMA and F16C
  avx512,    ///< F, BW, DQ and VL
};

const char* name_of(Isa isa) noexcept;

/// The best instruction set that this build and this machine have.
Isa detected_isa() noexcept;

}  // namespace dualdecoder::cpu

/// Defines `const Type& name(Isa)`, which gives the table `name` of an instruction set's namespace. Use inside namespace dualdecoder::cpu.
#if defined(DUALDECODER_SIMD_X86)
#define DUALDECODER_SIMD_CHOICE(Type, name)                          \
  namespace simd_baseline {                                          \
  extern const Type name;                                            \
  }                                                                  \
  namespace simd_avx2 {                                              \
  extern const Type name;                                            \
  }                                                                  \
  namespace simd_avx512 {                                            \
  extern const Type name;                                            \
  }                                                                  \
  const Type& name(Isa isa) noexcept {                               \
    if (isa == Isa::avx512) return simd_avx512::name;                \
    return isa == Isa::avx2 ? simd_avx2::name : simd_baseline::name; \
  }
#else
#define DUALDECODER_SIMD_CHOICE(Type, name) \
  namespace simd_baseline {                 \
  extern const Type name;                   \
  }                                         \
  const Type& name(Isa) noexcept { return simd_baseline::name; }
#endif
