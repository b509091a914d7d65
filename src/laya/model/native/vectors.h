/* Vectors of sixteen float32: conversions, exp and sums that every part of the step shares. AVX-512 only. */
#ifndef LAYA_VECTORS_H
#define LAYA_VECTORS_H

#include <immintrin.h>
#include <stdint.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

INLINE __m512 from_bf16(const uint16_t *numbers) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)numbers)), 16));
}

/* To the nearest, ties to even, as torch rounds; what is not finite stays so. */
INLINE void to_bf16(uint16_t *out, __m512 values) {
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(rounded));
}

/* exp within 2 units of the last place: 2^n times a polynomial of the rest. Constants come first in min and max: a number that
 * is none passes through. */
INLINE __m512 exp16(__m512 x) {
    x = _mm512_min_ps(_mm512_set1_ps(88.7f), x);
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3981999507e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(8.3334519073e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(4.1665795894e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.6666665459e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.0000001201e-1f));
    sum = _mm512_fmadd_ps(_mm512_mul_ps(sum, rest), rest, _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(sum, n);
}

#endif
