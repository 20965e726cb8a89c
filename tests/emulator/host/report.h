// Reports: what is wrong, of which kind, and where in the kernel.
#pragma once

namespace emu {

// The kinds of report; mirrored in run.py.
enum class Kind {
  none,
  bounds,      // memory that belongs to no array of the launch, or lies outside a view of it
  race,        // two accesses that nothing orders
  unwritten,   // read before anybody wrote
  in_flight,   // touched while an asynchronous operation works on it
  output,      // an output written twice or not at all, an input written
  deadlock,    // nobody can go on
  divergence,  // threads that must do the same do different things
  protocol,    // an instruction's rule is broken
  undefined,   // undefined behaviour of C++
};

// Ends the launch. `pc` is an address in the kernel; in the text, "@%p" stands for one too.
[[noreturn]] void fail(Kind kind, const char* format, ...) __attribute__((format(printf, 2, 3)));
[[noreturn]] void fail_at(const void* pc, Kind kind, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

}  // namespace emu
