// The kernels for what every CPU of the architecture has.
#define FUSEDACCUM_ISA isa_default
#define FUSEDACCUM_TABLE kernels_default
#define FUSEDACCUM_NAME "default"
#include "kernels.inc.h"
