// The kernels for AVX-512 F, BW, DQ and VL.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// In GCC 12's own avx512fintrin.h: _mm512_undefined_ps() and similar functions.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define FUSEDACCUM_ISA isa_avx512
#define FUSEDACCUM_TABLE kernels_avx512
#define FUSEDACCUM_NAME "avx512"
#include "kernels.inc.h"
#endif
