// Signals raised by a kernel become findings; the thread that raised one stops, the process goes on.
#pragma once
#include "worker.h"

void faults_install();
void faults_restore();
// For the calling worker: a stack of its own for the handler, because the kernel's may be what has overflowed.
void faults_attach(Worker* w);
void faults_detach(Worker* w);
constexpr int kInterrupt = 23;  // SIGURG: sent to workers when the time is up
