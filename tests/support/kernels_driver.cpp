// Runs the kernels over recorded inputs, without Python: on Arm in an emulator, and here under the address sanitizer.
//
// The file is cases one after the other: the kernel's name, sizes, a bound, the inputs and what they should give
// (tests/fast/test_instructions.py writes it). Every array lies in memory of exactly its size.

#include <cstdio>
#include <cstdlib>
#include <string>

#include "decode.cpp"
#include "prefill.cpp"
#include "recurrent.cpp"

static FILE* file;

template <class T = char>
static std::vector<T> array() {
    int64_t bytes;
    if (fread(&bytes, 8, 1, file) != 1) return {};
    std::vector<T> values(bytes / sizeof(T));
    if (fread(values.data(), 1, bytes, file) != (size_t)bytes) abort();
    return values;
}

static std::vector<float> as_floats(const std::vector<char>& data, int32_t format) {
    std::vector<float> values(data.size() / (format == FP32 ? 4 : 2));
    for (size_t i = 0; i < values.size(); i++)
        values[i] = format == FP32 ? ((const float*)data.data())[i] : to_float(((const bf16*)data.data())[i]);
    return values;
}

struct Matrix {
    std::vector<int64_t> sizes = array<int64_t>();  // N, K, format
    std::vector<char> data = array(), scale = array();
    std::vector<float> bias = array<float>();
    Weight weight{data.data(), scale.data(), bias.empty() ? nullptr : bias.data(), sizes[0], sizes[1], (int32_t)sizes[2], sizes[0], nullptr};
};

typedef const std::vector<int64_t>& Sizes;

static void run_linear(Sizes n, std::vector<char>& y) {  // M
    Matrix w;
    auto x = array<float>();
    linear((float*)y.data(), x.data(), n[0], &w.weight);
}

static void run_steps(Sizes n, std::vector<char>& y) {  // B, H, Hk, D, format, pages: stride, head stride, size, width
    Matrix qkv, o, gate_up, down;
    auto norm = array<float>(), q_norm = array<float>(), k_norm = array<float>(), mlp_norm = array<float>();
    auto cos = array<float>(), sin = array<float>();
    auto keys = array(), values = array();
    auto table = array<int32_t>(), lengths = array<int32_t>(), sequence = array<int32_t>();
    auto x = array();
    Layer layer{qkv.weight, o.weight, gate_up.weight, down.weight, norm.data(), q_norm.data(), k_norm.data(),
                mlp_norm.data(), n[1], n[2], n[3], 1e-6f, (int32_t)n[4]};
    Pages pages{keys.data(), values.data(), n[5], n[6], n[7], table.data(), n[8], lengths.data(),
                sequence.empty() ? nullptr : sequence.data(), nullptr, (int32_t)n[4]};
    const Layer* layers[] = {&layer};
    const Pages* each[] = {&pages};
    steps(layers, 1, (float*)x.data(), n[0], cos.data(), sin.data(), n[3], each);
    y = x;
}

static void run_norm(Sizes n, std::vector<char>& y) {  // M, C, format
    auto x = array<float>(), weight = array<float>();
    norm_rows(y.data(), x.data(), n[0], n[1], weight.data(), 1e-6f, n[2]);
}

static void run_split(Sizes n, std::vector<char>& y) {  // B, T, H, Hk, D, format of qkv, of the rest
    auto qkv = array();
    auto q_norm = array<float>(), k_norm = array<float>(), cos = array<float>(), sin = array<float>();
    int64_t unit = n[0] * n[1] * n[4] * (n[6] == FP32 ? 4 : 2);
    std::vector<char> q(unit * n[2]), k(unit * n[3]), v(unit * n[3]);
    split_rows(qkv.data(), n[0], n[1], n[2], n[3], n[4], q_norm.data(), k_norm.data(), 1e-6f, cos.data(), sin.data(), 0,
               q.data(), k.data(), v.data(), n[5], n[6]);
    y = q;
    y.insert(y.end(), k.begin(), k.end());
    y.insert(y.end(), v.begin(), v.end());
}

static void run_gate(Sizes n, std::vector<char>& y) {  // M, I, format
    auto both = array();
    gate_rows(y.data(), both.data(), n[0], n[1], n[2]);
}

static void run_exp(Sizes n, std::vector<char>& y) {  // → e^x over what it should be, in fp64: 1, but for the error
    auto x = array<float>();
    for (int64_t i = 0; i < n[0]; i += 16) {
        float e[16];
        store16(e, exp16(load16(&x[i])));
        for (int j = 0; j < 16; j++) ((float*)y.data())[i + j] = e[j] / exp((double)x[i + j]);
    }
}

static void run_flash(Sizes n, std::vector<char>& y) {  // B, H, Hk, T, S, D
    auto q = array(), k = array(), v = array();
    if (has_flash(n[5]))
        flash_attention(y.data(), q.data(), k.data(), v.data(), n[0], n[1], n[2], n[3], n[4], n[5], n[2] * n[4] * n[5],
                        n[4] * n[5]);
    else y.clear();
}

static void run_delta(Sizes n, std::vector<char>& y) {  // heads, Dk, Dv → y and the new state
    auto q = array<float>(), k = array<float>(), v = array<float>(), g = array<float>(), beta = array<float>();
    auto S = array<float>();
    std::vector<float> out(n[0] * n[2]);
    gated_delta_step(out.data(), q.data(), k.data(), v.data(), g.data(), beta.data(), S.data(), S.data(), n[0], n[1], n[2]);
    memcpy(y.data(), out.data(), 4 * out.size());
    memcpy(y.data() + 4 * out.size(), S.data(), 4 * S.size());
}

int main(int, char** arguments) {
    const struct { const char* name; void (*run)(Sizes, std::vector<char>&); } kernels[] = {
        {"linear", run_linear}, {"steps", run_steps}, {"norm_rows", run_norm}, {"split_rows", run_split},
        {"gate_rows", run_gate}, {"exp16", run_exp}, {"flash_attention", run_flash},
        {"gated_delta_step", run_delta}};
    file = fopen(arguments[1], "rb");
    if (!file) return 2;
    printf("%s\n", instructions());
    for (auto name = array(); !name.empty(); name = array()) {
        std::string wanted(name.begin(), name.end());
        auto sizes = array<int64_t>();
        float bound = array<float>().at(0);
        auto expected = array();
        int32_t format = array<int64_t>().at(0);
        std::vector<char> y(expected.size());
        for (auto& kernel : kernels) if (wanted == kernel.name) kernel.run(sizes, y);
        if (y.empty()) { printf("%s absent\n", wanted.c_str()); continue; }
        auto found = as_floats(y, format), right = as_floats(expected, format);
        double largest = 0, apart = 0;
        bool good = found.size() == right.size();
        for (size_t i = 0; good && i < right.size(); i++) {
            largest = fmax(largest, fabs(right[i])), apart = fmax(apart, fabs(found[i] - right[i]));
            good = std::isfinite(found[i]);
        }
        good = good && apart <= bound * largest;
        printf("%s %s %.1e of %.1e\n", wanted.c_str(), good ? "good" : "BAD", apart / largest, bound);
    }
}
