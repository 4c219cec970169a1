// Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
//
// Vectors of the instruction set that a .simd.inl file is compiled for, as compiler extensions that g++ and clang share. For inclusion
// inside an anonymous namespace in namespace dualdecoder::cpu::DUALDECODER_SIMD_NAMESPACE, after <cstddef>, <cstdint> and, on x86,
// <immintrin.h>: what widens small elements is spelt out there, because g++ 12 turns __builtin_convertvector from 8 bits into scalar
// code and splits it from 16 bits (measured: 16 and 2 times as slow).

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr std::size_t kStep = static_cast<std::size_t>(kLanes);

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t IntVector __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t BitVector __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t HalfVector __attribute__((vector_size(kLanes * 2)));
typedef std::int8_t ByteVector __attribute__((vector_size(kLanes)));
typedef std::uint8_t UnsignedByteVector __attribute__((vector_size(kLanes)));
typedef float LooseVector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef std::uint16_t LooseHalfVector __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef std::int8_t LooseByteVector __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef std::uint8_t LooseUnsignedByteVector __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef std::int32_t LooseIntVector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16)));
typedef float LooseFour __attribute__((vector_size(16), aligned(4), may_alias));

inline __attribute__((always_inline)) Vector load(const float* p) { return *reinterpret_cast<const LooseVector*>(p); }
inline __attribute__((always_inline)) IntVector load(const std::int32_t* p) { return *reinterpret_cast<const LooseIntVector*>(p); }
#if defined(__AVX512F__)
constexpr std::uint16_t kAll = 0xFFFF;                                       // masks nothing; without a mask g++ 12 warns of its own header
inline __attribute__((always_inline)) Vector load(const std::uint16_t* p) {  // bf16
  return (Vector)((BitVector)_mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))) << 16);
}
inline __attribute__((always_inline)) Vector load(const std::int8_t* p) {
  const auto wide = (IntVector)_mm512_maskz_cvtepi8_epi32(kAll, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return __builtin_convertvector(wide, Vector);
}
inline __attribute__((always_inline)) IntVector load_bytes(const std::uint8_t* p) {
  return (IntVector)_mm512_maskz_cvtepu8_epi32(kAll, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
/// Bit l: lane l of a comparison is true.
inline __attribute__((always_inline)) unsigned bits_of(IntVector comparison) { return _mm512_movepi32_mask((__m512i)comparison); }
#elif defined(__AVX2__)
inline __attribute__((always_inline)) Vector load(const std::uint16_t* p) {
  return (Vector)((BitVector)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))) << 16);
}
inline __attribute__((always_inline)) Vector load(const std::int8_t* p) {
  const auto wide = (IntVector)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return __builtin_convertvector(wide, Vector);
}
inline __attribute__((always_inline)) IntVector load_bytes(const std::uint8_t* p) {
  return (IntVector)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __attribute__((always_inline)) unsigned bits_of(IntVector comparison) {
  return static_cast<unsigned>(_mm256_movemask_ps((__m256)comparison));
}
#else
inline __attribute__((always_inline)) Vector load(const std::uint16_t* p) {
  const HalfVector half = *reinterpret_cast<const LooseHalfVector*>(p);
  return (Vector)(__builtin_convertvector(half, BitVector) << 16);
}
inline __attribute__((always_inline)) Vector load(const std::int8_t* p) {
  const ByteVector bytes = *reinterpret_cast<const LooseByteVector*>(p);
  return __builtin_convertvector(bytes, Vector);
}
inline __attribute__((always_inline)) IntVector load_bytes(const std::uint8_t* p) {
  const UnsignedByteVector bytes = *reinterpret_cast<const LooseUnsignedByteVector*>(p);
  return __builtin_convertvector(bytes, IntVector);
}
inline __attribute__((always_inline)) unsigned bits_of(IntVector comparison) {
  unsigned bits = 0;
  for (int l = 0; l < kLanes; ++l) bits |= (comparison[l] != 0 ? 1U : 0U) << l;
  return bits;
}
#endif
inline __attribute__((always_inline)) void store(float* p, Vector v) { *reinterpret_cast<LooseVector*>(p) = v; }
inline __attribute__((always_inline)) void store(std::int32_t* p, IntVector v) { *reinterpret_cast<LooseIntVector*>(p) = v; }
inline __attribute__((always_inline)) Vector splat(float x) { return Vector{} + x; }

inline __attribute__((always_inline)) float widened(float x) { return x; }
inline __attribute__((always_inline)) float widened(std::uint16_t x) {
  union {
    std::uint32_t bits;
    float value;
  } u = {static_cast<std::uint32_t>(x) << 16};
  return u.value;
}

/// Sums of lanes i, i+4, i+8, ... as four lanes.
inline __attribute__((always_inline)) Four fold(Vector v) {
#if defined(__AVX512F__)
  const auto eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#elif defined(__AVX2__)
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  return v;
#endif
}

/// Sum of all lanes.
inline __attribute__((always_inline)) float total(Vector v) {
  const Four four = fold(v);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

/// total() of four vectors, with the same order of additions.
inline __attribute__((always_inline)) Four totals(Vector a, Vector b, Vector c, Vector d) {
  const Four fa = fold(a);
  const Four fb = fold(b);
  const Four fc = fold(c);
  const Four fd = fold(d);
  const Four ab = __builtin_shufflevector(fa, fb, 0, 1, 4, 5) + __builtin_shufflevector(fa, fb, 2, 3, 6, 7);
  const Four cd = __builtin_shufflevector(fc, fd, 0, 1, 4, 5) + __builtin_shufflevector(fc, fd, 2, 3, 6, 7);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

/// exp(x) for x <= 88, within 2 ulp; 0 below -87.3. Cody-Waite reduction and the polynomial of Cephes' expf.
inline __attribute__((always_inline)) Vector exponential(Vector x) {
  const Vector magic = splat(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const Vector rounded = x * 1.44269504088896341F + magic;
  const Vector n = rounded - magic;
  const Vector r = x - n * 0.693359375F - n * -2.12194440e-4F;
  Vector p = r * 1.9875691500e-4F + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  const IntVector exponent = (IntVector)rounded << 23;  // the magic number's own bits leave at the top
  const Vector scaled = (Vector)((IntVector)p + exponent);
  return x < splat(-87.3F) ? Vector{} : scaled;
}
