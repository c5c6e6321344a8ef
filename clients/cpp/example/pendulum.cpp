// A pendulum that learns to swing up: a simulator with its own physics, and several sessions in the threads of one
// process. Usage: pendulum URL TOKEN [SESSIONS [EPISODES [SEED]]]; the episodes are those of each session.

#include "../stagecoach_client.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr int kSteps = 200;  // 10 seconds

// A rod of 1 m and 1 kg, pivoted at one end; a motor there is too weak to lift it without swinging.
class Pendulum {
public:
    explicit Pendulum(unsigned seed) : random_(seed) {}

    std::vector<double> reset() {
        angle_ = std::uniform_real_distribution<>(-kPi, kPi)(random_);
        speed_ = std::uniform_real_distribution<>(-1, 1)(random_);
        return observation();
    }

    // Advances by 50 ms; returns the reward, which is 0 at rest above the pivot.
    double advance(double torque) {
        torque = std::clamp(torque, -2.0, 2.0);
        const double away = std::remainder(angle_, 2 * kPi);
        const double reward = -(away * away + 0.1 * speed_ * speed_ + 0.001 * torque * torque);
        const double acceleration = 15 * std::sin(angle_) + 3 * torque;  // 3g/2l, and 3/(m l^2), with g = 10
        speed_ = std::clamp(speed_ + 0.05 * acceleration, -8.0, 8.0);
        angle_ += 0.05 * speed_;
        return reward;
    }

    std::vector<double> observation() const { return {std::cos(angle_), std::sin(angle_), speed_}; }

private:
    std::mt19937 random_;
    double angle_ = 0, speed_ = 0;  // the angle from above the pivot
};

double play(stagecoach::Session& session, Pendulum& pendulum) {
    double total = 0;
    auto action = session.reset(pendulum.reset());
    for (int step = 1; action; ++step) {
        const double reward = pendulum.advance(action->numbers().at(0));
        total += reward;
        action = session.step(reward, pendulum.observation(), false, step == kSteps);
    }
    return total;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 3) return std::fprintf(stderr, "usage: pendulum URL TOKEN [SESSIONS [EPISODES [SEED]]]\n"), 2;
    const auto number = [&](int place, int usual) { return place < count ? std::atoi(arguments[place]) : usual; };
    const int sessions = number(3, 4), episodes = number(4, 30), seed = number(5, 0);
    std::vector<double> sums(static_cast<std::size_t>(episodes));  // the returns of the n-th episodes
    std::mutex mutex;
    bool failed = false;
    std::vector<std::thread> threads;
    for (int index = 0; index < sessions; ++index)
        threads.emplace_back([&, index] {
            try {
                stagecoach::Session session({arguments[1], arguments[2], "pendulum-" + std::to_string(index)});
                Pendulum pendulum(static_cast<unsigned>(seed * sessions + index));
                for (double& sum : sums) {
                    const double total = play(session, pendulum);
                    const std::lock_guard lock(mutex);
                    sum += total;
                }
                session.settle(60);
                session.close();
            } catch (const std::exception& error) {
                const std::lock_guard lock(mutex);
                std::fprintf(stderr, "session %d: %s\n", index, error.what());
                failed = true;
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (int first = 0; first < episodes; first += 5) {
        const int last = std::min(first + 5, episodes);
        double sum = 0;
        for (int episode = first; episode < last; ++episode) sum += sums[static_cast<std::size_t>(episode)];
        std::printf("episodes %3d to %3d: mean return %7.1f\n", first + 1, last, sum / (last - first) / sessions);
    }
    return failed ? 1 : 0;
}
