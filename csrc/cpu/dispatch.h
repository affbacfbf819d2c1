// Which instruction set's kernels run: the best this CPU has, lowered by
// FUSEDACCUM_CPU_CAPABILITY=default|avx2|avx512.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace fusedaccum {
namespace cpu {

// The kernels in use. Throws std::invalid_argument when the environment names an instruction set
// that does not exist or is missing.
const KernelTable& kernels();

// True if prefetching pays even in kernels that compute little. Measured: it does on an Intel Xeon
// with AMX; it costs on AMD's Zen 3 and Zen 4, and makes no difference on Zen 5
// (docs/performance.md).
bool prefetch_pays();

// Names of what this CPU can run, the best last.
std::vector<std::string> capabilities();

// Use these from now on (tests); not while ops are running. Throws std::invalid_argument as
// kernels() does.
void set_capability(const std::string& name);

}  // namespace cpu
}  // namespace fusedaccum
