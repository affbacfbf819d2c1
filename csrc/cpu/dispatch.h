// Which instruction set's kernels run: the best this CPU has, lowered by FUSEDACCUM_CPU_CAPABILITY=default|avx2|avx512.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace fusedaccum {
namespace cpu {

// The kernels in use. Throws std::invalid_argument when the environment names an instruction set that does not exist or is missing.
const KernelTable& kernels();

// Does prefetching pay also in kernels that compute little? Measured: it does on an Intel Xeon with AMX; on AMD's Zen 3 and Zen 4 it
// costs, on Zen 5 nothing either way (docs/performance.md).
bool prefetch_pays();

// Names of what this CPU can run, the best last.
std::vector<std::string> capabilities();

// Use these from now on (tests); not while ops are running. Throws std::invalid_argument as kernels() does.
void set_capability(const std::string& name);

}  // namespace cpu
}  // namespace fusedaccum
