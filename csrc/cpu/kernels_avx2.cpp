// The kernels for AVX2 and F16C.
#if defined(__x86_64__)
#define FUSEDACCUM_ISA isa_avx2
#define FUSEDACCUM_TABLE kernels_avx2
#define FUSEDACCUM_NAME "avx2"
#include "kernels.inc.h"
#endif
