// One thread that keeps a stream busy for a time and touches no memory. See hold.py.

__global__ void hold(long long ns) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        __nanosleep(200);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < ns);
}
