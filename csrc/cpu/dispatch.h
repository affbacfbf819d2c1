// Which instruction set's kernels run: the best this CPU has, lowered by FUSEDACCUM_CPU_CAPABILITY=default|avx2|avx512.
//
// Sources of the extension: csrc/bindings_cpu.cpp, csrc/cpu/dispatch.cpp, csrc/cpu/launch.cpp, and csrc/cpu/kernels_<isa>.cpp once an
// instruction set: _default (no flags), _avx2 (-mavx2 -mf16c), _avx512 (-mavx512f -mavx512bw -mavx512dq -mavx512vl -mf16c); on other
// architectures the last two compile to nothing. All of them: -std=c++17 (or newer) -O3 -ffp-contract=off, never -march=native or
// fast-math. bindings_cpu.cpp is compiled with -fopenmp, but nothing is linked with it: PyTorch's own OpenMP must be found.
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
